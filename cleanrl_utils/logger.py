"""TensorBoard, Weights & Biases, the progress display, and where the time went."""

import dataclasses
import glob
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cleanrl_utils.config import RunArgs, UsageError
from cleanrl_utils.process import ranks


class NullLogger:
    """What every process but rank 0 logs to, so that no line of a script asks for the rank."""

    run_name = ""

    def games(self, games: Iterable[tuple[int, float, int]]) -> None:
        """Log finished games, each (global_step at its end, episodic_return, episodic_length)."""

    def metrics(self, metrics: Mapping[str, float], global_step: int) -> None:
        """Log one iteration's numbers at `global_step`, the number of environment steps of the whole job."""

    def final(self, global_step: int, param_sum: float) -> None:
        """Say that the run is done: steps, and the sum of all parameters, by which runs can be compared."""

    def close(self) -> None:
        """Write out what is pending."""


class Logger(NullLogger):
    """Makes the run folder, writes TensorBoard's event file to it, and W&B's with `--track`.

    The tags are CleanRL's. `charts/SPS` is added to each iteration's metrics: steps of the whole job since this
    start, by the seconds since then. W&B gets the same numbers with `global_step` as the axis.
    """

    def __init__(self, args: RunArgs, env_id: str, total_timesteps: int):
        self.run_name = _make_run_folder(args, env_id)
        folder = f"runs/{self.run_name}"
        self._wandb = _start_wandb(args, self.run_name) if args.track else None
        from torch.utils.tensorboard import SummaryWriter  # here: takes as long to import as torch

        self._writer = SummaryWriter(folder, flush_secs=10)
        rows = "\n".join(f"|{key}|{value}|" for key, value in dataclasses.asdict(args).items())
        self._writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        print(f"run: {folder}", file=sys.stderr)
        self._progress = _Bar(total_timesteps) if sys.stderr.isatty() else _Lines(total_timesteps)
        self._returns: deque[float] = deque(maxlen=100)
        self._videos_sent: set[str] = set()
        self._step = 0
        self._start = time.monotonic()

    def games(self, games: Iterable[tuple[int, float, int]]) -> None:
        # in the order of the steps, and within a step of the environments, as they came
        for step, episodic_return, episodic_length in sorted(games, key=lambda game: game[0]):
            self._returns.append(episodic_return)
            self._write({"charts/episodic_return": episodic_return, "charts/episodic_length": episodic_length}, step)

    def metrics(self, metrics: Mapping[str, float], global_step: int) -> None:
        sps = global_step / max(time.monotonic() - self._start, 1e-9)
        self._step = global_step
        self._write({**metrics, "charts/SPS": sps}, global_step)
        self._send_videos()
        mean = f"{np.mean(self._returns):.1f}" if self._returns else "-"
        self._progress.show(global_step, sps, mean)

    def final(self, global_step: int, param_sum: float) -> None:
        self._progress.close()
        print(f"final: global_step={global_step} param_sum={param_sum:.10f}", flush=True)

    def _write(self, metrics: Mapping[str, float], step: int) -> None:
        for tag, value in metrics.items():
            self._writer.add_scalar(tag, value, step)
        if self._wandb:
            self._wandb.log({**metrics, "global_step": step})

    def _send_videos(self, finished: bool = False) -> None:
        """To W&B, once each. The newest may still be growing, until the environments are closed."""
        if self._wandb:
            import wandb

            files = sorted(glob.glob(f"videos/{glob.escape(self.run_name)}/*.mp4"), key=os.path.getmtime)
            for file in files if finished else files[:-1]:
                if file not in self._videos_sent:
                    self._videos_sent.add(file)
                    self._wandb.log({"videos": wandb.Video(file, format="mp4"), "global_step": self._step})

    def close(self) -> None:
        self._progress.close()
        self._send_videos(finished=True)
        self._writer.close()
        if self._wandb:
            self._wandb.finish()


def open_logger(args: RunArgs, env_id: str, total_timesteps: int) -> NullLogger:
    """The job's one logger, in the process of rank 0; a `NullLogger` in the others."""
    return Logger(args, env_id, total_timesteps) if ranks()[0] == 0 else NullLogger()


def _make_run_folder(args: RunArgs, env_id: str) -> str:
    """A folder that is this run's alone, also if another job starts in the same second."""
    second = int(time.time())
    while True:
        # the slash of ALE/Pong-v5 would be a folder in runs/
        name = args.run_name or f"{env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{second}"
        try:
            os.makedirs(f"runs/{name}")
            return name
        except FileExistsError:
            if args.run_name:
                raise UsageError(f"--run-name {name}: runs/{name} exists; choose another name") from None
            second += 1
        except OSError as error:
            raise UsageError(f"can't make runs/{name} in {os.getcwd()}: {error.strerror}") from None


def check_wandb_login(args: RunArgs) -> None:
    """Usage error where W&B has no key and no terminal to ask for one. Call it before anything is made."""
    if args.track and ranks()[0] == 0 and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        try:
            wandb.login()
        except wandb.Error as error:
            raise UsageError(f"--track: {str(error).splitlines()[0]}; or set WANDB_MODE=offline") from None


def _start_wandb(args: RunArgs, run_name: str) -> Any:
    import wandb

    run = wandb.init(
        project=args.wandb_project_name,
        entity=args.wandb_entity,
        config=dataclasses.asdict(args),
        name=run_name,
        save_code=True,
    )
    run.define_metric("global_step")
    run.define_metric("*", step_metric="global_step")
    return run


class _Bar:
    """A progress bar, for a terminal."""

    FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def __init__(self, total: int):
        from tqdm import tqdm

        self._bar = tqdm(total=total, dynamic_ncols=True, bar_format=self.FORMAT)

    def show(self, global_step: int, sps: float, mean_return: str) -> None:
        self._bar.set_postfix_str(f"SPS {sps:.0f}, mean return {mean_return}", refresh=False)
        self._bar.update(global_step - self._bar.n)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """One line every few seconds, for log files."""

    EVERY = 5.0  # seconds

    def __init__(self, total: int):
        self._total, self._last = total, 0.0

    def show(self, global_step: int, sps: float, mean_return: str) -> None:
        now = time.monotonic()
        if now - self._last >= self.EVERY or global_step == self._total:
            self._last = now
            left = (self._total - global_step) / max(sps, 1e-9)
            clock = f"{int(left // 3600)}:{int(left % 3600 // 60):02}:{int(left % 60):02}"
            print(
                f"step {global_step}/{self._total}  SPS {sps:.0f}  left {clock}  mean return {mean_return}",
                file=sys.stderr,
            )

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
