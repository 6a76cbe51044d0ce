"""What the benchmarks share: contenders in turns, trainings as users start them, a table, a picture, a JSON."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
Contender = Callable[[], "float | tuple[float, dict[str, float]]"]
WARM_UP = 2  # iterations of a training that are not counted


@dataclass(frozen=True)
class Measured:
    """The values of one contender, one a round, and what else is known of it."""

    values: list[float]
    notes: dict[str, list[float]]


def in_turns(contenders: Mapping[str, Contender], rounds: int, warm_up: int = 0) -> dict[str, Measured]:
    """Call each contender once a round, so that a drift of the machine's speed meets all of them.

    A contender returns its value, or (value, notes). The first `warm_up` rounds are not counted.
    """
    measured = {name: Measured([], {}) for name in contenders}
    for number in range(warm_up + rounds):
        for name, contender in contenders.items():
            result = contender()
            value, notes = result if isinstance(result, tuple) else (result, {})
            if number >= warm_up:
                measured[name].values.append(value)
                for note, x in notes.items():
                    measured[name].notes.setdefault(note, []).append(x)
            print(f"  round {number + 1}/{warm_up + rounds}  {name}: {value:.1f}", file=sys.stderr, flush=True)
    return measured


def middle(values: Sequence[float]) -> float:
    return float(np.median(values))


def spread(values: Sequence[float], digits: int) -> str:
    """Median (min..max)."""
    return f"{middle(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def report(
    name: str, title: str, unit: str, measured: Mapping[str, Measured], baseline: str | None, out: str, settings: Any
) -> None:
    """Print the table; write `{out}/{name}.json` and `{out}/{name}.png`. Ratios are taken round by round."""
    base = measured[baseline].values if baseline else []
    ratios = {row: [a / b for a, b in zip(m.values, base, strict=True)] if base else [] for row, m in measured.items()}
    notes = list(dict.fromkeys(note for m in measured.values() for note in m.notes))
    header = ["", unit, *([f"x {baseline}"] if base else []), *notes]
    rows = [header]
    for row, m in measured.items():
        cells = [row, spread(m.values, 0 if middle(m.values) >= 20 else 2)]
        cells += [spread(ratios[row], 2)] if base else []
        cells += [f"{middle(m.notes[note]):.3g}" if note in m.notes else "" for note in notes]
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    print(f"\n{title}: median (min..max) of {len(next(iter(measured.values())).values)} rounds\n")
    for i, cells in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |")
        if i == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    os.makedirs(out, exist_ok=True)
    data = {
        "title": title,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "settings": vars(settings),
        "unit": unit,
        "baseline": baseline,
        "rows": {row: {"values": m.values, "ratios": ratios[row], **m.notes} for row, m in measured.items()},
    }
    Path(out, f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    _picture(f"{out}/{name}.png", title, unit, measured)
    print(f"\n{out}/{name}.json and .png written; {machine_line(data['machine'])}, {data['date']}")


def _picture(path: str, title: str, unit: str, measured: Mapping[str, Measured]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(measured)[::-1]
    values = [middle(measured[name].values) for name in names]
    low = [value - min(measured[name].values) for name, value in zip(names, values, strict=True)]
    high = [max(measured[name].values) - value for name, value in zip(names, values, strict=True)]
    _, ax = plt.subplots(figsize=(7, 0.9 + 0.36 * len(names)), dpi=110)
    ax.barh(names, values, xerr=[low, high], color="#4477aa", ecolor="#222222", height=0.62, capsize=2)
    ax.set(xlabel=f"{unit}, median and range", title=title)
    ax.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.savefig(path)
    plt.close()


def machine() -> dict[str, Any]:
    """The hardware and versions that the numbers depend on."""
    import torch

    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), model)
        flags = next((line for line in lines if line.startswith("flags")), "")
        model += "".join(f", {flag}" for flag in ("avx2", "avx512_bf16", "amx_bf16") if f" {flag}" in flags)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def machine_line(found: Mapping[str, Any]) -> str:
    return ", ".join([f"{found['cores']} cores of {found['processor']}", *found["gpus"], f"torch {found['torch']}"])


def torchrun(nproc: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc_per_node={nproc}"]


def train(
    argv: Sequence[str], batch: int, tag: str = "charts/SPS", env: Mapping[str, str] | None = None
) -> tuple[float, dict[str, float]]:
    """Run a training in a folder of its own; its steps per second, and notes.

    `tag` is logged once an iteration of `batch` steps; the times of these points give the speed, without the start and
    the first WARM_UP iterations. Notes: the whole process's seconds, the peak memory in MB of the largest process and
    of all, processor time by cores, and the script's own time shares.
    """
    import psutil

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with open(f"{folder}/log", "w+") as log:
            job = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log, env={**os.environ, **(env or {})})
            peaks: dict[int, float] = {}
            busy: dict[int, float] = {}

            def watch() -> None:
                while job.poll() is None:
                    try:
                        family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
                    except psutil.Error:
                        return
                    for process in family:
                        try:
                            times, memory = process.cpu_times(), process.memory_info()
                        except psutil.Error:  # it has just ended
                            continue
                        busy[process.pid] = times.user + times.system
                        peaks[process.pid] = max(peaks.get(process.pid, 0), memory.rss / 1e6)
                    time.sleep(0.25)

            watcher = threading.Thread(target=watch)
            watcher.start()
            job.wait()
            watcher.join()
            seconds = time.perf_counter() - start
            if job.returncode != 0:
                log.seek(0)
                raise SystemExit(f"{' '.join(argv)}\nended with exit code {job.returncode}:\n{log.read()[-3000:]}")
        points = read(folder)
    wall = [time for time, _ in points[tag]]
    notes = {
        "seconds": seconds,
        "MB, largest process": max(peaks.values()),
        "MB, all": sum(peaks.values()),
        "cores busy": sum(busy.values()) / seconds,
    }
    for part in ("env", "inference", "update", "allreduce"):
        if f"time/{part}" in points:
            notes[part] = middle([value for _, value in points[f"time/{part}"][WARM_UP:]])
    return batch / middle(np.diff(wall[WARM_UP - 1 :]).tolist()), notes


def read(folder: str) -> dict[str, list[tuple[float, float]]]:
    """{tag: [(wall time, value), ...]} of all event files below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[str, list[tuple[float, float]]] = {}
    for file in sorted(Path(folder).rglob("events*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            points.setdefault(tag, []).extend((e.wall_time, e.value) for e in events.Scalars(tag))
    return points
