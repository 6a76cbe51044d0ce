"""TensorBoard, Weights & Biases, the progress display, and where the time went."""

import contextlib
import dataclasses
import glob
import os
import shlex
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from cleanrl_utils.config import Fault, RunArgs, UsageError, say
from cleanrl_utils.process import Stopped, local_world_size, on_rank_0, ranks, under_torchrun


class NullLogger:
    """What every process but rank 0 logs to, so that no line of a script asks for the rank."""

    run_name = ""

    def say(self, line: str) -> None:
        """Show a line beside the progress display."""

    def games(self, games: Iterable[tuple[int, float, int]]) -> None:
        """Log finished games, each (global_step at its end, episodic_return, episodic_length)."""

    def metrics(self, metrics: Mapping[str, float], global_step: int) -> None:
        """Log one iteration's numbers at `global_step`, the number of environment steps of the whole job."""

    def final(self, global_step: int, param_sum: float) -> None:
        """Say that the run is done: steps, and the sum of all parameters, by which runs can be compared."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, so that the logs of a continued run go on."""
        return {}

    def flush(self) -> None:
        """Write to the disk what is pending."""

    def close(self) -> None:
        """End the logs."""


ADVICE = {  # where most of the time went -> what shortens it
    "env": "more processes on more cores, or --vector-env async beside a GPU, step environments at the same time",
    "inference": "more environments in each process let a forward pass serve more steps",
    "update": "more processes on more cores, a GPU, or a processor with bf16 units and --precision bf16 make it faster",
    "allreduce": "fewer processes with more environments each, or a faster network, make it smaller",
    "checkpoint": "a larger --checkpoint-every makes it smaller",
}


class Logger(NullLogger):
    """Writes TensorBoard's event file to the run's folder, and W&B's with `--track`.

    The tags are CleanRL's. `charts/SPS` is added to each iteration's metrics: steps of the whole job since this
    start, by the seconds since then. W&B gets the same numbers with `global_step` as the axis, and
    `charts/mean_return`, of the last 100 games, by which runs can be sorted.

    A run that continues from step S drops what was logged after S: TensorBoard by its `purge_step`; W&B online since
    its rows are numbered, and those that the server has are not taken again.
    """

    SLOW = 20.0  # seconds of an iteration, since torchrun and Kubernetes give 30 to end (docker stop: 10)

    def __init__(self, args: RunArgs, run_name: str, total_timesteps: int, saved: Mapping[str, Any]):
        self.run_name, self._step = run_name, saved.get("global_step", 0)
        before = saved.get("logger", {"returns": [], "rows": 0, "wandb_id": None})
        self._returns: deque[float] = deque(before["returns"], maxlen=100)
        self._rows = before["rows"]  # sent to W&B
        self._wandb = _start_wandb(args, run_name, before["wandb_id"]) if args.track else None
        from torch.utils.tensorboard import SummaryWriter  # here: takes as long to import as torch

        folder = f"runs/{run_name}"
        self._writer = SummaryWriter(folder, flush_secs=10, purge_step=self._step + 1 if self._step else 0)
        for tag, facts in (("hyperparameters", dataclasses.asdict(args)), ("start", _start_facts(args))):
            rows = "\n".join(f"|{key}|{value}|" for key, value in facts.items())
            self._writer.add_text(tag, f"|param|value|\n|-|-|\n{rows}", self._step)
        say(f"run: {folder}{f', from step {self._step}' if self._step else ''}")
        progress = _Bar if sys.stderr.isatty() else _Lines
        self._progress = progress(total_timesteps, self._step)
        self._failed: set[str] = set()  # what can't be written any more
        self._time: Counter[str] = Counter()  # sums of the iterations' shares
        self._first_step, self._start = self._step, time.monotonic()

    def say(self, line: str) -> None:
        self._progress.say(line)

    def games(self, games: Iterable[tuple[int, float, int]]) -> None:
        # in the order of the steps, and within a step of the environments, as they came
        for step, episodic_return, episodic_length in sorted(games, key=lambda game: game[0]):
            self._returns.append(episodic_return)
            self._write({"charts/episodic_return": episodic_return, "charts/episodic_length": episodic_length}, step)

    def metrics(self, metrics: Mapping[str, float], global_step: int) -> None:
        seconds = max(time.monotonic() - self._start, 1e-9)
        sps = (global_step - self._first_step) / seconds
        if self._step == self._first_step and seconds > self.SLOW:
            self.say(f"notice: an iteration takes {seconds:.0f} s, and what ends a job may kill it after 30 s")
        self._step = global_step
        self._time.update({tag[5:]: share for tag, share in metrics.items() if tag.startswith("time/")})
        mean = {"charts/mean_return": float(np.mean(self._returns))} if self._returns else {}
        self._write({**metrics, "charts/SPS": sps}, global_step, **mean)
        self._send_videos()
        self._progress.show(global_step, sps, "".join(f"{value:.1f}" for value in mean.values()) or "-")

    def final(self, global_step: int, param_sum: float) -> None:
        self._progress.close()
        if self._time:
            total = sum(self._time.values())
            # what is no work at all deserves a word from a fifth of the largest part on
            most = max(self._time, key=lambda p: self._time[p] * (5 if p in ("allreduce", "checkpoint") else 1))
            shares = ", ".join(f"{part} {share / total:.0%}" for part, share in self._time.items())
            self.say(f"time: {shares}; {most}: {ADVICE.get(most, 'the largest part')}")
        print(f"final: global_step={global_step} param_sum={param_sum:.10f}", flush=True)

    def _write(self, metrics: Mapping[str, float], step: int, **for_wandb: float) -> None:
        with self._spared("TensorBoard's events", OSError):
            for tag, value in metrics.items():
                self._writer.add_scalar(tag, value, step)
        with self._spared("W&B's rows", Exception):
            if self._wandb:
                self._wandb.log({**metrics, **for_wandb, "global_step": step}, step=self._rows)
        self._rows += 1

    def _send_videos(self, finished: bool = False) -> None:
        """To W&B, once each: `.sent` beside them names those that were. The newest may grow until it is `finished`."""
        with self._spared("W&B's videos", Exception):
            files = sorted(glob.glob(f"videos/{glob.escape(self.run_name)}/*.mp4"), key=os.path.getmtime)
            if self._wandb and files:
                import wandb

                with open(f"videos/{self.run_name}/.sent", "a+") as sent:
                    sent.seek(0)
                    before = sent.read().splitlines()
                    for file in files if finished else files[:-1]:
                        if file not in before:
                            self._wandb.log({"videos": wandb.Video(file, format="mp4")}, step=max(self._rows - 1, 0))
                            print(file, file=sent)

    @contextlib.contextmanager
    def _spared(self, what: str, *errors: type[Exception]) -> Iterator[None]:
        """A full disk, or a signal to all processes, which ends W&B's, costs these points and not the run."""
        try:
            yield
        except errors as error:
            if what not in self._failed:
                self.say(f"warning: {what} of this start can't be written any more: {error}")
            self._failed.add(what)

    def state(self) -> dict[str, Any]:
        return {"returns": list(self._returns), "rows": self._rows, "wandb_id": self._wandb and self._wandb.id}

    def flush(self) -> None:
        with self._spared("TensorBoard's events", OSError):
            self._writer.flush()
            for path in glob.glob(f"runs/{glob.escape(self.run_name)}/events*"):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())  # of the file, whoever wrote it

    def close(self) -> None:
        self._progress.close()
        self._send_videos(finished=True)
        with self._spared("TensorBoard's events", OSError):
            self._writer.close()
        failed = sys.exc_info()[1]  # of the run, which is being closed
        with self._spared("W&B's rows", Exception):
            if self._wandb and isinstance(failed, Stopped):
                self._wandb.mark_preempting()
            if self._wandb:
                self._wandb.finish(exit_code=int(failed is not None))


def open_logger(args: RunArgs, run_name: str, total_timesteps: int, saved: Mapping[str, Any]) -> NullLogger:
    """The job's one logger, in the process of rank 0; a `NullLogger` in the others. `saved`: of `load_checkpoint`."""
    return Logger(args, run_name, total_timesteps, saved) if ranks()[0] == 0 else NullLogger()


def check_wandb_login(args: RunArgs) -> None:
    """Usage error where W&B has no key that its server takes. All processes call it, before anything is made."""
    if args.track:
        on_rank_0(_login, args)


def _login(args: RunArgs) -> None:
    import wandb

    hint = ""
    try:
        wandb.Settings(project=args.wandb_project_name, run_tags=args.wandb_tags or None)
        hint = "; or set WANDB_MODE=offline"
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):  # others would wait for an answer
            raise wandb.Error("no key; give one to `wandb login` or in WANDB_API_KEY")
    except (wandb.Error, ValueError) as error:  # ValueError: a setting, such as WANDB_MODE
        raise UsageError(f"--track: {' '.join(str(error).split()).rstrip('.')}{hint}") from None


def _start_wandb(args: RunArgs, run_name: str, run_id: str | None) -> Any:
    import wandb

    try:
        run = wandb.init(
            id=run_id,  # else WANDB_RUN_ID, else a new one
            resume="allow" if wandb.setup().settings.mode == "online" else None,
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            group=args.wandb_group,
            tags=args.wandb_tags or None,  # else WANDB_TAGS
            config={**dataclasses.asdict(args), "world_size": ranks()[2]},
            name=run_name,
            save_code=True,
        )
    except wandb.Error as error:
        raise Fault(f"--track: {str(error).splitlines()[0]}") from None
    run.define_metric("global_step")
    run.define_metric("*", step_metric="global_step")
    return run


def _start_facts(args: RunArgs) -> dict[str, Any]:
    """What it takes to repeat the run, beside its arguments: command, commit, machine and versions."""
    from cleanrl_utils.checkpoint import machine  # which imports this module

    script, local = os.path.abspath(sys.argv[0]), local_world_size()
    nodes = f"--nnodes={ranks()[2] // local}" if ranks()[2] > local else "--standalone --nnodes=1"
    launcher = f"torchrun {nodes} --nproc_per_node={local}" if under_torchrun() else "python"
    commit, cpu = "", ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        git = ["git", "-C", os.path.dirname(script), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        cpu = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    return {
        "command": f"{launcher} {shlex.join([os.path.basename(script), *sys.argv[1:]])}",
        "commit": commit or "unknown",
        "cpu": f"{os.cpu_count()} cores of {cpu or 'unknown'}",
        "python": sys.version.split()[0],
        **machine(args),
    }


class _Bar:
    """A progress bar, for a terminal."""

    FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def __init__(self, total: int, first: int):
        from tqdm import tqdm

        self._bar = tqdm(total=total, initial=first, dynamic_ncols=True, bar_format=self.FORMAT)

    def say(self, line: str) -> None:
        say(line, self._bar.write)

    def show(self, global_step: int, sps: float, mean_return: str) -> None:
        self._bar.set_postfix_str(f"SPS {sps:.0f}, mean return {mean_return}", refresh=False)
        self._bar.update(global_step - self._bar.n)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """One line every few seconds, for log files."""

    EVERY = 5.0  # seconds

    def __init__(self, total: int, first: int):
        self._total, self._last = total, 0.0

    def say(self, line: str) -> None:
        say(line)

    def show(self, global_step: int, sps: float, mean_return: str) -> None:
        now = time.monotonic()
        if now - self._last >= self.EVERY or global_step == self._total:
            self._last = now
            left = (self._total - global_step) / max(sps, 1e-9)
            clock = f"{int(left // 3600)}:{int(left % 3600 // 60):02}:{int(left % 60):02}"
            self.say(f"step {global_step}/{self._total}  SPS {sps:.0f}  left {clock}  mean return {mean_return}")

    def close(self) -> None:
        pass


class Stopwatch:
    """Charges wall time to the parts of an iteration.

    `lap(part)` adds the time since the previous call to `part`. On a GPU the time until the work is queued counts,
    except where the process waits for its result.
    """

    def __init__(self, *parts: str):
        self._seconds = dict.fromkeys(parts, 0.0)
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def shares(self) -> dict[str, float]:
        """Each part's share of the time since the last call; they sum to 1."""
        total = sum(self._seconds.values()) or 1.0
        shares = {part: seconds / total for part, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return shares
