"""Runs as data: TensorBoard's event files of these scripts, of CleanRL and of Stable-Baselines3, and kept results.

TensorBoard's own reader takes a dozen times as long for a run of 10 million steps and stops silently at damage, so the
records are read here; what a record says is parsed by TensorBoard's protocol buffers.
"""

import fnmatch
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cleanrl_utils.scores import RANDOM_AND_HUMAN, game_name

RETURN, LENGTH = "charts/episodic_return", "charts/episodic_length"
# Stable-Baselines3's names for the same numbers, and the factor to ours: it logs the negated entropy, and squared
# errors of the value where CleanRL halves them.
SB3_TAGS = {
    "rollout/ep_rew_mean": (RETURN, 1.0),
    "rollout/ep_len_mean": (LENGTH, 1.0),
    "time/fps": ("charts/SPS", 1.0),
    "train/learning_rate": ("charts/learning_rate", 1.0),
    "train/value_loss": ("losses/value_loss", 0.5),
    "train/policy_gradient_loss": ("losses/policy_loss", 1.0),
    "train/entropy_loss": ("losses/entropy", -1.0),
    "train/approx_kl": ("losses/approx_kl", 1.0),
    "train/clip_fraction": ("losses/clipfrac", 1.0),
    "train/explained_variance": ("losses/explained_variance", 1.0),
}
STUDY = "study.json"  # in the folder of a study of `cleanrl_utils.tune`, which holds its trials' runs
LONGEST = 1 << 20  # bytes; a longer record holds a picture, no scalar


@dataclass
class Series:
    """The points of one tag, in the order in which they were logged. All arrays have shape (n,)."""

    steps: np.ndarray  # environment steps of the whole job
    seconds: np.ndarray  # of running, since the run's first start; NaN where they are not known
    values: np.ndarray


EMPTY = Series(np.empty(0, np.int64), np.empty(0), np.empty(0))


@dataclass
class Run:
    """One training run, under CleanRL's tags wherever it came from."""

    name: str
    folder: str
    env_id: str
    exp_name: str
    seed: int | None
    series: dict[str, Series]
    params: dict[str, str] = field(default_factory=dict)  # the arguments, as they were logged
    facts: dict[str, Any] = field(default_factory=dict)  # command, commit, versions, date, ...
    of_means: bool = False  # the returns are running means (Stable-Baselines3), not single games
    evaluation: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)  # what is wrong with its files, a line each

    @property
    def game(self) -> str:
        return game_name(self.env_id)

    @property
    def returns(self) -> Series:
        return self.series.get(RETURN, EMPTY)

    @property
    def steps(self) -> int:
        """Environment steps that the run has reached."""
        return max((int(s.steps.max()) for s in self.series.values() if len(s.steps)), default=0)

    @property
    def seconds(self) -> float:
        """Time for which the run has been running; NaN where it is not known."""
        known = [float(np.nanmax(s.seconds)) for s in self.series.values() if np.isfinite(s.seconds).any()]
        return max(known, default=float("nan"))


# === Records ==========================================================================================================
def _crc_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


_CRC_TABLE = _crc_table()


def masked_crc32c(rows: np.ndarray) -> np.ndarray:
    """TFRecord's checksum of each row. rows: uint8 (n, length); returns uint32 (n,)."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        crc = _CRC_TABLE[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    crc = ~crc
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def read_records(data: bytes) -> tuple[list[bytes], str]:
    """The sound records of an event file's bytes, and what is wrong with the others ("" for nothing).

    A record is its length (uint64), the length's checksum, the data, the data's checksum (TensorFlow's TFRecord
    format, https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
    """
    if not data:
        return [], "is empty"
    starts, lengths, position, problem = [], [], 0, ""
    while position < len(data):
        if position + 12 > len(data):
            problem = "ends within a record"
            break
        (length,) = struct.unpack_from("<Q", data, position)
        if position + 16 + length > len(data):
            problem = "ends within a record"
            break
        starts.append(position)
        lengths.append(length)
        position += 16 + length
    raw = np.frombuffer(data, np.uint8)
    start, size = np.array(starts, np.int64), np.array(lengths, np.int64)
    # One wrong length spoils all that follows. If it points out of the file, the record is not among the others.
    heads = start if problem == "" or position + 12 > len(data) else np.append(start, position)
    head = raw[heads[:, None] + np.arange(12)] if len(heads) else np.empty((0, 12), np.uint8)
    wrong = np.flatnonzero(masked_crc32c(head[:, :8]) != head[:, 8:].copy().view("<u4").ravel())
    if len(wrong):
        start, size = start[: wrong[0]], size[: wrong[0]]
        problem = f"is damaged from byte {heads[wrong[0]]} on" if wrong[0] else "is no event file"
    sound = size <= LONGEST
    for length in np.unique(size[sound]):
        (which,) = np.nonzero(size == length)
        rows = raw[start[which, None] + np.arange(12, 16 + length)]
        sound[which] = masked_crc32c(rows[:, :length]) == rows[:, length:].copy().view("<u4").ravel()
    damaged = int((~sound & (size <= LONGEST)).sum())
    if damaged:
        problem = f"has {damaged} damaged record{'s' * (damaged > 1)}" + f" and {problem}" * bool(problem)
    return [data[s + 12 : s + 12 + n] for s, n in zip(start[sound], size[sound], strict=True)], problem


def _parsed(path: str, notes: list[str]) -> list[Any]:
    """The events of a file, as TensorBoard's `Event` messages; notes get a line for what is wrong."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        with open(path, "rb") as file:
            records, problem = read_records(file.read())
        events = [Event.FromString(record) for record in records]
    except (OSError, DecodeError) as error:
        events, problem = [], f"can't be read: {error}"
    if problem:
        rest = f"; its first {len(events)} records are used" if "ends" in problem or "from byte" in problem else ""
        notes.append(f"{path} {problem}{rest if events else ''}")
    return events


# === Runs =============================================================================================================
def read_events(folder: str, name: str = "") -> Run:
    """The run of an event folder. A restart drops what was logged at or after its step, as in TensorBoard.

    Time is the time of running: it goes on over the starts of a run (one event file each) without the pauses between
    them, and includes work that was lost.
    """
    from tensorboard.compat.proto.event_pb2 import SessionLog

    notes: list[str] = []
    paths = [os.path.join(folder, f) for f in sorted(os.listdir(folder)) if "tfevents" in f]
    files = [(path, events) for path in paths if (events := _parsed(path, notes))]
    files.sort(key=lambda file: file[1][0].wall_time)
    points: dict[str, list[tuple[int, float, float]]] = {}
    texts: dict[str, str] = {}
    before = 0.0  # seconds of the starts before this one
    for path, events in files:
        first = last = events[0].wall_time
        reached, begun = max((series[-1][0] for series in points.values() if series), default=-1), False
        for event in events:
            last = max(last, event.wall_time)
            scalars = [value for value in event.summary.value if value.HasField("simple_value")]
            restart = not scalars and event.session_log.status == SessionLog.START
            if scalars and not begun and event.step <= reached:
                restart = True  # a program that continues a folder without saying so
                notes.append(
                    f"{path} goes back from step {reached} to {event.step}; older points from there are dropped"
                )
            if restart:
                points = {tag: [p for p in series if p[0] < event.step] for tag, series in points.items()}
            begun = begun or restart or bool(scalars)
            for value in scalars:
                points.setdefault(value.tag, []).append(
                    (event.step, before + event.wall_time - first, value.simple_value)
                )
            for value in event.summary.value if not scalars else ():
                if value.tag.endswith("/text_summary") and value.tensor.string_val:
                    texts[value.tag.removesuffix("/text_summary")] = value.tensor.string_val[0].decode(errors="replace")
        before += last - first
    of_means = RETURN not in points and "rollout/ep_rew_mean" in points
    series = {}
    for tag, rows in points.items():
        if rows:
            ours, factor = SB3_TAGS.get(tag, (tag, 1.0)) if of_means else (tag, 1.0)
            steps, seconds, values = zip(*rows, strict=True)
            series[ours] = Series(np.array(steps, np.int64), np.array(seconds), np.array(values) * factor)
    params, facts = _table(texts.get("hyperparameters", "")), _table(texts.get("start", ""))
    name = name or os.path.basename(os.path.abspath(folder))
    env_id, exp_name, seed = _identity(folder, name, params)
    run = Run(name, folder, env_id, exp_name, seed, series, params, facts, of_means, notes=notes)
    if files:
        run.facts["date"] = files[0][1][0].wall_time
    run.evaluation = _evaluation(folder, notes)
    return run


def _table(text: str) -> dict[str, str]:
    """The rows of a Markdown table `|param|value|`."""
    rows = [line.strip()[1:-1].partition("|") for line in text.splitlines()[2:] if line.startswith("|")]
    return {key: value for key, _, value in rows}


def _identity(folder: str, name: str, params: dict[str, str]) -> tuple[str, str, int | None]:
    """(env_id, exp_name, seed): as logged, else from the folder's name, CleanRL's or Stable-Baselines3's."""
    if "env_id" in params:
        seed = params.get("seed", "")
        return params["env_id"], params.get("exp_name", name), int(seed) if seed.isdigit() else None
    if match := re.fullmatch(r"(.+?)__(.+)__(\d+)__\d+", os.path.basename(name)):
        return match[1], match[2], int(match[3])
    words = os.path.basename(name).split("_")
    number = int(words.pop()) if words[-1].isdigit() and len(words) > 1 else None
    for word in [*words, *reversed(os.path.abspath(folder).split(os.sep)[:-1])]:
        if game_name(word) in RANDOM_AND_HUMAN:
            return word, "_".join(w for w in words if w != word) or "run", number
    return "unknown game", "_".join(words), number


def _evaluation(folder: str, notes: list[str]) -> dict[str, Any] | None:
    """What `cleanrl_utils.evaluate` has left in the run's folder."""
    path = os.path.join(folder, "evaluation.json")
    if os.path.exists(path):
        try:
            with open(path) as file:
                return checked_evaluation(json.load(file))
        except (OSError, ValueError, TypeError, KeyError) as error:
            notes.append(f"{path} can't be read: {type(error).__name__}: {error}")
    return None


def checked_evaluation(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The evaluation, whose numbers are numbers; else one of the usual errors of parsing."""
    numbers = {name: float(evaluation[name]) for name in ("mean", "std", "iqm")}
    return {**evaluation, **numbers, "games": int(evaluation.get("games", 0))}


def find_runs(paths: Iterable[str], only: str = "*") -> tuple[list[Run], list[str]]:
    """All runs under the paths whose name matches `only`, in the order of their names, and lines on what is wrong.

    A run is a folder with event files, or with a kept result (`cleanrl_utils.results`). Those of a study's trials are
    left out, unless a path is one of them. A folder that several paths lead to is one run.
    """
    runs: list[Run] = []
    notes: list[str] = []
    seen: set[str] = set()
    for path in paths:
        for folder, name, files in _folders(path):
            place = os.path.realpath(folder)
            if place in seen or not fnmatch.fnmatch(name, only):
                continue
            seen.add(place)
            if not any("tfevents" in file for file in files):
                from cleanrl_utils.results import read_result

                run = read_result(folder, notes)
            else:
                run = read_events(folder, name)
            if run is None:
                continue
            notes += run.notes
            if run.series:
                runs.append(run)
            elif not run.notes:
                notes.append(f"{folder} has no scalars yet")
    return sorted(runs, key=lambda run: run.name), notes


def _folders(path: str) -> Iterator[tuple[str, str, list[str]]]:
    """(folder, its name under the path, its files) of all runs under the path, but for those of a study's trials."""
    for folder, folders, files in os.walk(path):
        folders[:] = [] if STUDY in files else sorted(folders)
        if "run.json" in files or any("tfevents" in file for file in files):
            relative = os.path.relpath(folder, path)
            yield folder, os.path.basename(os.path.abspath(folder)) if relative == "." else relative, files
