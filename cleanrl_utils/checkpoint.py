"""Checkpoints of the whole job: what a start continues from, and how a run is saved so that nothing is lost.

A checkpoint is one file, `{checkpoint_dir}/{run_name}/checkpoint-{iteration}.pt`, that
`torch.load(file, weights_only=True)` reads: the dictionary that the script gave to `save_checkpoint`, and

    envs      what each environment of the job needs to go on, by its number
    random    the global generators, by process
    config    the arguments that the run depends on
    command   the script's name and flags, as given
    machine   threads, processor and versions, on which the last bits depend

It is written beside, flushed and renamed. The zip format brings the checksums.
"""

import atexit
import contextlib
import fcntl
import glob
import importlib.metadata
import io
import json
import os
import platform
import random
import re
import sys
import threading
import time
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from cleanrl_utils.config import Fault, RunArgs, UsageError, flag_name, say
from cleanrl_utils.logger import NullLogger
from cleanrl_utils.process import Args, gather, on_rank_0, ranks

FORMAT, VERSION = "cleanrl-distributed checkpoint", 1
PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "opencv-python-headless")
KEEP = 3
WRITE_LIMIT = 20.0  # seconds; then the run goes on, or ends, without this checkpoint. torchrun gives 30 to end.
LOCK_WAIT = 60.0  # seconds that a run waits for the job before it to end

# Every other argument must be that of the run that is continued, also those that a copied script adds.
MAY_CHANGE = {
    *("total_timesteps", "exp_name", "run_name", "capture_video", "track"),
    *("wandb_project_name", "wandb_entity", "wandb_group", "wandb_tags"),
    *("resume", "init_from", "checkpoint_every", "checkpoint_dir", "cuda", "num_threads", "backend", "device_ids"),
    *("vector_env", "num_envs", "batch_size"),  # of the last two, what they make of the sizes must not change
}
PLAYABLE = {"agent": dict, "config": dict, "machine": dict, "global_step": int}  # to play from; WHOLE: to go on
WHOLE = {**PLAYABLE, "envs": list, "random": list, "logger": dict, "iteration": int, "launch": str}


class Unreadable(Exception):
    """The file is not a whole checkpoint of these scripts."""


class CheckpointFolder:
    """The checkpoint files of a folder, on a disk or in an object store (by fsspec)."""

    def __init__(self, url: str, flag: str = "--checkpoint-dir"):
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        try:
            self.fs, self.path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except Exception as error:  # a store that is unknown, not installed, or takes no such URL
            raise UsageError(f"{flag}: {url}: {_line(error)}") from None
        self.local = isinstance(self.fs, LocalFileSystem)

    def files(self) -> list[str]:
        """Paths of the checkpoints, the newest last."""
        try:
            names = self.fs.ls(self.path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:  # whatever a store says
            raise Fault(f"can't read {self.path}: {_line(error)}") from None
        return sorted(name for name in names if re.fullmatch(r"checkpoint-\d{8}\.pt", os.path.basename(name)))

    def read(self, path: str, parts: Mapping[str, type] = PLAYABLE) -> dict[str, Any]:
        """A checkpoint's contents; `Unreadable` where it is damaged or foreign, a usage error where it is too new."""
        try:
            data = self.fs.cat_file(path)
        except IsADirectoryError as error:
            raise Unreadable(_line(error)) from None
        except Exception as error:
            raise Fault(f"can't read {path}: {_line(error)}") from None
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as file:
                damaged = file.testzip()  # torch.load does not compare the checksums
            state = {} if damaged else torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        except Exception as error:  # whatever the parsers make of arbitrary bytes
            raise Unreadable(_line(error)) from None
        if damaged:
            raise Unreadable(f"{damaged} in it is damaged")
        if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("version"), int):
            raise Unreadable("not a checkpoint of these scripts")
        if state["version"] > VERSION:
            raise UsageError(f"{path}: format {state['version']}, of a newer version of this project than this one")
        wrong = [name for name, kind in parts.items() if not isinstance(state.get(name), kind)]
        if wrong:
            raise Unreadable(f"not a whole checkpoint: {', '.join(wrong)}")
        return state

    def newest(self, parts: Mapping[str, type] = PLAYABLE) -> dict[str, Any] | None:
        """The newest checkpoint that can be read; None if there is no file."""
        files = self.files()
        for path in reversed(files):
            try:
                return self.read(path, parts)
            except Unreadable as error:
                say(f"warning: skipped {path}: {error}")
        if files:
            raise Fault(f"none of the {len(files)} checkpoints in {self.path} can be read")
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file that is there as a whole or not at all, then remove those that are too old."""
        path = f"{self.path}/{name}"
        if self.local:
            os.makedirs(self.path, exist_ok=True)
            try:
                with open(f"{path}.tmp", "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:  # a full disk
                with contextlib.suppress(OSError):
                    os.remove(f"{path}.tmp")
                raise
            os.replace(f"{path}.tmp", path)
            folder = os.open(self.path, os.O_RDONLY)
            os.fsync(folder)  # the new name, too
            os.close(folder)
        else:
            self.fs.pipe_file(path, data)  # an object store shows an object once all of it has arrived
        left = glob.glob(f"{glob.escape(self.path)}/checkpoint-*.pt.tmp") if self.local else []  # by a killed process
        with contextlib.suppress(Fault):  # a store that can't be listed now
            for old in [*self.files()[:-KEEP], *left]:
                with contextlib.suppress(Exception):  # what can't be removed now is removed the next time
                    self.fs.rm_file(old)


def save_checkpoint(
    args: RunArgs, logger: NullLogger, iteration: int, global_step: int, envs: list[tuple], state: dict[str, Any]
) -> None:
    """Write the whole job's state. All processes call it, at the same iteration.

    `envs`: for each environment of this process a tuple of what it needs to go on; the lists of all are joined.
    `state`: what is equal in all processes, with the network as "agent". All of it is tensors, numbers, strings, bytes,
    lists and dictionaries. If the file can't be written, the training goes on with a warning, and the checkpoints
    before it stay.
    """
    start = time.monotonic()
    if any(env[0] is None for env in envs):
        logger.say("warning: no checkpoint: the environments have no attribute `state` to go on from")
        return
    state = {**state, "iteration": iteration, "global_step": global_step}
    envs = [tuple(x.clone() if torch.is_tensor(x) else x for x in env) for env in envs]  # a row drags its tensor along
    state |= {"envs": gather(envs), "random": gather([_random_state()])}
    on_rank_0(_save, args, logger, state, start)  # all wait: if one left, torchrun would end rank 0 while it writes


def _save(args: RunArgs, logger: NullLogger, state: dict[str, Any], start: float) -> None:
    state |= {"format": FORMAT, "version": VERSION, "launch": launch_id(), "logger": logger.state()}
    command = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    state |= {"config": run_config(args), "command": command, "machine": machine(args)}
    data = io.BytesIO()
    torch.save(state, data)
    logger.flush()  # so that no step before the checkpoint's can be missing from the logs
    folder = CheckpointFolder(f"{args.checkpoint_dir}/{logger.run_name}")
    name = f"checkpoint-{state['iteration']:08}.pt"
    problem = [f"not written within {WRITE_LIMIT:.0f} s"]

    def write() -> None:
        try:
            folder.write(name, data.getvalue())
            problem.clear()
        except Exception as error:  # whatever a store says
            problem[:] = [_line(error)]

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(WRITE_LIMIT)
    if problem:
        logger.say(f"warning: no checkpoint of iteration {state['iteration']}: {problem[0]}")
    else:
        seconds = time.monotonic() - start
        logger.say(f"checkpoint: {folder.path}/{name}  {data.tell() / 1e6:.1f} MB in {seconds:.2f} s")


def load_checkpoint(args: Args) -> tuple[Args, dict[str, Any]]:
    """What this start goes on from, equal in all processes. All of them call it. Nothing is created.

    Returns the arguments and, with --resume or if torchrun has restarted the processes, the run's newest checkpoint
    if it has one; else, with --init-from, that checkpoint's weights as {"agent": ...}; else {}. In torchrun's
    restarts with another number of processes, the arguments get the sizes of the run.
    """
    state = on_rank_0(_find, args)
    if "config" not in state:
        return args, state
    run, now = state["config"], run_config(args)
    sizes: dict[str, Any] = {name: run[name] for name in ("total_num_envs", "num_steps")}
    if _of_this_launch(state) and any(now[name] != size for name, size in sizes.items()):
        if ranks()[0] == 0:
            say(f"notice: restarted by torchrun with the sizes of the run: {sizes}")
        sizes["batch_size"] = None  # the run's num_steps came from it
        args = replace(args, **sizes)
        now = run_config(args)
    if "envs" not in state:
        return args, {"agent": state["agent"]} if "agent" in state else {}
    flags = {name: flag_name(name if hasattr(args, name) else "num_envs") for name in run.keys() | now.keys()}
    rules = [f"{flags[name]} {b}: the run to continue has {a}" for name, a, b in _differences(run, now)]
    if rules:
        raise UsageError("; ".join(rules))
    changes = [f"{name} {a} -> {b}" for name, a, b in _differences(state["machine"], machine(args))]
    if changes and ranks()[0] == 0:
        say(f"notice: continued within rounding, not bit for bit: {', '.join(changes)}")
    return args, state


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, value there, value here) where they differ."""
    values = [(name, there.get(name), here.get(name)) for name in sorted(there.keys() | here.keys())]
    return [(name, a, b) for name, a, b in values if a != b]


def load_weights(agent: torch.nn.Module, weights: dict[str, torch.Tensor] | None) -> None:
    """Copy a checkpoint's weights, if there are any, into the network; a usage error names what does not fit."""
    if weights is None:
        return
    there, here = ({n: tuple(t.shape) for n, t in w.items()} for w in (weights, agent.state_dict()))
    unlike = [f"{name} {a} there, {b} here" for name, a, b in _differences(there, here)]
    if unlike:
        raise UsageError(f"the checkpoint has another network: {'; '.join(unlike)}")
    agent.load_state_dict(weights)


def restore_random(states: list[dict[str, Any]]) -> None:
    """Put back torch's, numpy's and Python's global generators, on which a changed script may draw."""
    state = states[ranks()[0] % len(states)]  # if there are more processes now
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


def _random_state() -> dict[str, Any]:
    numpy: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [numpy[0], torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]],
        "python": random.getstate(),
    }


def run_config(args: RunArgs) -> dict[str, Any]:
    """The arguments that the run depends on, with the sizes of the whole job."""
    given, world_size = asdict(args), ranks()[2]
    num_envs = given.get("total_num_envs") or given["num_envs"] * world_size
    if given.get("batch_size"):
        given["num_steps"] = given["batch_size"] * world_size // num_envs
    given["total_num_envs"] = num_envs
    plain = (bool, int, float, str, type(None))
    return {k: v if isinstance(v, plain) else repr(v) for k, v in given.items() if k not in MAY_CHANGE}


def machine(args: RunArgs) -> dict[str, Any]:
    """What the last bits of a run depend on."""
    gpu = torch.cuda.get_device_name() if args.cuda and torch.cuda.is_available() else None
    return {
        "processes": ranks()[2],
        "threads": torch.get_num_threads(),
        "device": gpu or f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def launch_id() -> str:
    """Names the torchrun that started this process, also after its restarts; "none" where it has no name."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


def _of_this_launch(left: Mapping[str, Any] | None) -> bool:
    """Whether this torchrun wrote it, before it restarted its processes."""
    return left is not None and left["launch"] == launch_id() != "none"


def make_run_folder(args: RunArgs, env_id: str) -> str:
    """Make the run's folder, its alone, and lock it; its name, equal in all processes. All of them call it."""
    return on_rank_0(_make_run_folder, args, env_id)


def _make_run_folder(args: RunArgs, env_id: str) -> str:
    second = int(time.time())
    while True:
        # the slash of ALE/Pong-v5 would be a folder in runs/
        name = args.run_name or f"{env_id}__{args.exp_name}__{args.seed}__{second}".replace("/", "-")
        try:
            making = f"runs/{name} in {os.getcwd()}"
            os.makedirs(f"runs/{name}", exist_ok=os.path.abspath(f"runs/{name}") in _locks and name == args.run_name)
            folder = CheckpointFolder(f"{args.checkpoint_dir}/{name}")
            if folder.local:
                making = f"--checkpoint-dir {folder.path}"
                os.makedirs(folder.path, exist_ok=True)
                _lock(folder.path)  # another job may run in another folder and write the same checkpoints
            lock = _lock(f"runs/{name}")
            lock.truncate(0)
            json.dump({"launch": launch_id(), "config": run_config(args)}, lock)
            lock.flush()
            return name
        except FileExistsError:
            if args.run_name:
                raise UsageError(f"--run-name {name}: another job has just made runs/{name}") from None
            second += 1
        except OSError as error:
            with contextlib.suppress(OSError):
                os.rmdir(f"runs/{name}")  # if it is empty: for the next try
            raise UsageError(f"can't make {making}: {error.strerror}") from None


_locks: dict[str, Any] = {}  # by folder; the kernel frees them when the process is gone, however it ended


def _lock(folder: str) -> Any:
    """The locked file `.lock` of a folder. Waits for a job that is ending, refuses beside one that goes on."""
    folder = os.path.abspath(folder)
    if folder not in _locks:
        file = open(f"{folder}/.lock", "a+")  # noqa: SIM115
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(f"another job has been using {folder} for {LOCK_WAIT:.0f} s") from None
                time.sleep(0.2)
        _locks[folder] = file
        atexit.register(file.close)  # with -W error, Python would complain of a file that is left open
    return _locks[folder]


def _find(args: RunArgs) -> dict[str, Any]:
    """What to continue, by rank 0's files; not by torchrun's count of restarts, which can differ between machines."""
    folder = CheckpointFolder(args.checkpoint_dir)  # an error if it is an unknown kind of store
    if folder.local and os.path.exists(folder.path) and not os.path.isdir(folder.path):
        raise UsageError(f"--checkpoint-dir: {folder.path} is not a folder")
    found: dict[str, Any] = {}
    if args.run_name is not None:
        try:
            found = _find_run(args, f"runs/{args.run_name}")
        except OSError as error:
            raise UsageError(f"--run-name {args.run_name}: {_line(error)}") from None
        if "envs" in found:
            return found
    return {**found, "agent": _weights_of(args.init_from)} if args.init_from is not None else found


def _find_run(args: RunArgs, run: str) -> dict[str, Any]:
    """The newest checkpoint; else, in a restart by torchrun, what the start before left; else {}."""
    before = _last_start(run)
    restarted = _of_this_launch(before)
    folder = CheckpointFolder(f"{args.checkpoint_dir}/{args.run_name}")
    if before and (args.resume or restarted):
        _lock(run)
        if folder.local and os.path.isdir(folder.path):
            _lock(folder.path)
    newest = folder.newest(WHOLE)
    restarted = restarted or _of_this_launch(newest)
    if (before or newest) and not (args.resume or restarted):
        rule = f"{run if before else folder.path} exists; --resume continues it, or choose another name"
        raise UsageError(f"--run-name {args.run_name}: {rule}")
    found = newest or (before if restarted and before else {})
    return {**found, "launch": launch_id()} if restarted else found


def _last_start(run: str) -> dict[str, Any] | None:
    """What the last job that used the run's folder left about itself, if there was one."""
    left = None
    with contextlib.suppress(ValueError, FileNotFoundError), open(f"{run}/.lock") as file:
        left = json.load(file)
    if isinstance(left, dict) and {"launch", "config"} <= left.keys():
        return left
    return {"launch": "none"} if os.path.exists(run) else None


def _weights_of(path: str) -> dict[str, torch.Tensor]:
    folder = CheckpointFolder(path, "--init-from")
    try:
        state = folder.read(folder.path) if folder.fs.isfile(folder.path) else folder.newest()
    except Unreadable as error:
        raise UsageError(f"--init-from {path}: {error}") from None
    if state is None:
        raise UsageError(f"--init-from {path}: there is no checkpoint")
    return state["agent"]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
