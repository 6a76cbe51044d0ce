"""Run a training script on several games and seeds, some at once: python -m cleanrl_utils.benchmark --help"""

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from cleanrl_utils import EXIT_PREEMPTED
from cleanrl_utils.config import NonNegative, Positive, require
from cleanrl_utils.runs import (
    Place,
    Run,
    StopRequest,
    clock,
    end_all,
    experiment,
    flags_of,
    own_flags,
    places,
    tool,
    words,
)
from cleanrl_utils.submit.spec import flag_value

EVERY = 0.2  # seconds between looks at the runs
WAITING = ("waiting", "elsewhere")
DONE = ("finished", "skipped", "failed", "interrupted")


@dataclass(frozen=True)
class Args:
    """Run a command on several games and seeds, some runs at once on this machine.

    Each run has its share of the cores and GPUs, a folder runs/{env_id}__{exp_name}__{seed} and in it run.log and
    attempts.json. The same command line again skips what is finished and continues the rest.

    Exit codes: 0 all runs are finished, 1 some have failed, 2 bad usage, 75 stopped by SIGTERM, 130 by Ctrl-C.
    """

    command: str
    """the command line of the script, as "python ppo_atari.py --total-timesteps 100000"; each run adds --env-id and
    --seed, and where the script has them --exp-name, --run-name and --resume"""
    env_ids: tuple[str, ...]
    """the games"""
    num_seeds: Positive[int] = 3
    """seeds of each game"""
    start_seed: NonNegative[int] = 1
    """the first of the seeds"""
    workers: NonNegative[int] = 1
    """runs at once; 0: only print their command lines, and the one that submits them to a cluster"""
    exp_name: str | None = None
    """part of the runs' names, by which the same script with other flags has runs of its own; the script's file name
    if not set"""
    auto_tag: bool = True
    """tag W&B runs with the code's version (git describe), where WANDB_TAGS is not set"""


def main(args: Args) -> int:
    """The exit code."""
    line = words(args.command)
    require(args.env_ids != (), "--env-ids", "", "needs a game")
    require(len(set(args.env_ids)) == len(args.env_ids), "--env-ids", " ".join(args.env_ids), "has a game twice")
    plain = args.exp_name is None or re.fullmatch(r"[\w.+-]+", args.exp_name) is not None
    require(plain, "--exp-name", repr(args.exp_name), "must be letters, digits, -, _, + and .")
    runs = grid(args, line, flags_of(line))
    if args.workers == 0:
        print(*(run.command for run in runs), sep="\n")
        print(f"\n# the same runs on a cluster:\n{submit_command(args, line)}")
        return 0
    for run in runs:
        rule = f"{run.folder} was begun by another command, `{run.others}`; give these runs another --exp-name"
        require(run.others is None, "--command", args.command, rule)
    if args.auto_tag and "WANDB_TAGS" not in os.environ and (tag := version()):
        os.environ["WANDB_TAGS"] = tag
    return work(runs, places(min(args.workers, len(runs))))


def grid(args: Args, line: list[str], flags: set[str]) -> list[Run]:
    """The runs: all games of the first seed, then of the next."""
    exp_name = args.exp_name or experiment(line)
    found = []
    for seed in range(args.start_seed, args.start_seed + args.num_seeds):
        for env_id in args.env_ids:
            name = f"{env_id.replace('/', '-')}__{exp_name}__{seed}"
            found.append(Run(name, [*line, *own_flags(flags, env_id, seed, exp_name, name)]))
    return found


def submit_command(args: Args, line: list[str]) -> str:
    """The command line that sends the same runs to AWS Batch; `submit_exp --help` knows other places.

    It starts scripts by its own launcher, and has a flag for what torchrun was told here.
    """
    script = next((i for i, word in enumerate(line) if word.endswith(".py")), None)
    if script is None:
        return "# (submit_exp takes `python SCRIPT.py` only)"
    command = ["python", *line[script:], *([] if args.exp_name is None else ["--exp-name", args.exp_name])]
    processes = flag_value(line[:script], "--nproc-per-node") or ""
    given = ["--provider", "aws", "--docker-tag", "IMAGE", "--job-queue", "QUEUE", "--command", shlex.join(command)]
    given += ["--num-processes", processes] if processes.isdigit() and processes != "1" else []
    given += ["--env-ids", *args.env_ids, "--num-seed", str(args.num_seeds), "--start-seed", str(args.start_seed)]
    return f"python -m cleanrl_utils.submit_exp {shlex.join(given)}"


def version() -> str:
    """The code's version by git, "" without it."""
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "describe", "--tags", "--always", "--dirty"], capture_output=True, text=True)
        return done.stdout.strip()
    return ""


def work(runs: list[Run], workplaces: list[Place]) -> int:
    """Bring the runs to their end, one at a time in each place: the exit code."""
    for run in runs:
        run.state = "skipped" if run.finished else "waiting"
    active: dict[int, Run] = {}  # by place
    stop = StopRequest()
    show = display(len(workplaces))
    try:
        while True:
            if stop:
                stop.pass_on(list(active.values()))
            for slot, place in enumerate(workplaces):
                if slot in active and active[slot].poll():
                    del active[slot]
                if slot not in active and not stop:
                    started = next((run for run in runs if run.state in WAITING and run.start(place)), None)
                    if started is not None:
                        active[slot] = started
            show(runs)
            if not active and (stop or not any(run.state in WAITING for run in runs)):
                break
            time.sleep(EVERY)
    finally:
        end_all(list(active.values()))
        show.close()
    return summary(runs, stop)


def summary(runs: list[Run], stop: StopRequest) -> int:
    """Say how it went: the exit code."""
    failed = [run for run in runs if run.state == "failed"]
    for run in failed:
        print(f"failed: {run.command}\n  {run.how_it_ended}, after {clock(run.record['seconds'])}; {run.log} ends with")
        print(run.tail())
    print(counts(runs))
    unfinished = any(run.state not in ("finished", "skipped") for run in runs)
    if unfinished:
        print("the same command line again skips what is finished and continues the rest")
    if stop:
        return stop.exit_code
    return 1 if failed else EXIT_PREEMPTED if unfinished else 0


# === Display ==========================================================================================================
def display(workers: int) -> "Lines":
    """A live table on a terminal, lines elsewhere."""
    if sys.stderr.isatty():
        if importlib.util.find_spec("rich") is not None:
            return Table(workers)
        print("notice: no live table without rich: pip install 'cleanrl-distributed[report]'", file=sys.stderr)
    return Lines(workers)


class Lines:
    """One line for each change of a run's state."""

    def __init__(self, workers: int):
        self._workers = workers
        self._shown: dict[str, str] = {}

    def __call__(self, runs: list[Run]) -> None:
        for run in runs:
            if run.state != self._shown.get(run.name, "waiting"):
                done = sum(run.state in DONE for run in runs)
                print(f"[{done}/{len(runs)}] {run.state} {run.name}{self._more(run)}", file=sys.stderr, flush=True)
            self._shown[run.name] = run.state

    def _more(self, run: Run) -> str:
        if run.state == "running":
            return f"  {run.place}, log {run.log}"
        if run.state == "elsewhere":
            return ": another process has it, perhaps one that is ending"
        if run.state == "failed":
            return f": {run.how_it_ended}, log {run.log}"
        now = run.progress
        if run.state in ("finished", "interrupted") and now:
            return f"  {clock(run.seconds)}, step {now.step}/{now.total}, mean return {now.shown_return}"
        return ""

    def close(self) -> None:
        pass


class Table(Lines):
    """All runs, and the newest that each has said."""

    COLORS: ClassVar = {"running": "cyan", "finished": "green", "skipped": "green", "failed": "bold red"}

    def __init__(self, workers: int):
        from rich.console import Console
        from rich.live import Live

        super().__init__(workers)
        self._last = 0.0
        # no refreshing thread: a process that is started while another thread holds a lock may hang
        self._live = Live(console=Console(stderr=True), auto_refresh=False)
        self._live.start()

    def __call__(self, runs: list[Run]) -> None:
        self._runs = runs
        if time.monotonic() - self._last > 1.0:
            self._last = time.monotonic()
            self._live.update(self.table(runs, self._live.console.height), refresh=True)

    def table(self, runs: list[Run], height: int) -> Any:
        """Of a grid that is higher than the terminal, what runs and what has failed."""
        from rich.table import Table

        caption = f"{counts(runs)}; time left {time_left(runs, self._workers)}"
        table = Table(caption=caption, caption_justify="left")
        for title in ("run", "state", "step", "steps/s", "mean return", "time", "left"):
            table.add_column(title, justify="left" if title in ("run", "state") else "right", no_wrap=title != "run")
        fits = len(runs) + 5 < height
        for run in runs if fits else [run for run in runs if run.state in ("running", "stopping", "failed")]:
            now = run.progress
            said = (
                [f"{100 * now.step // now.total} % of {now.total:,}", f"{now.sps:,}", now.shown_return]
                if now
                else ["-"] * 3
            )
            time_taken = clock(run.seconds) if run.place else ""
            left = clock(now.left) if now and run.state == "running" else ""
            table.add_row(run.name, run.state, *said, time_taken, left, style=self.COLORS.get(run.state))
        return table

    def close(self) -> None:
        self._live.update(self.table(self._runs, self._live.console.height), refresh=True)
        self._live.stop()


def counts(runs: list[Run]) -> str:
    """How many runs are in which state."""
    states = dict.fromkeys(run.state for run in runs)
    found = ", ".join(f"{sum(run.state == state for run in runs)} {state}" for state in states)
    return f"{len(runs)} runs: {found}"


def time_left(runs: list[Run], workers: int) -> str:
    """Of all runs, by what those that run say, and as long as these for those that wait."""
    running = [now.left for run in runs if run.state == "running" and (now := run.progress)]
    whole = [run.seconds + now.left for run in runs if run.state == "running" and (now := run.progress)]
    whole += [run.seconds for run in runs if run.state == "finished"]
    waiting = sum(run.state in WAITING for run in runs)
    if not whole:
        return "-"
    longest = max(running, default=0.0)
    return clock(max(longest, (sum(running) + waiting * sum(whole) / len(whole)) / workers))


if __name__ == "__main__":
    sys.exit(tool(main, Args, sys.argv[1:]))
