"""Runs of training scripts as processes: their place on the machine, their logs, their end. Nobody is left behind.

Each run has a folder `runs/{name}` with `run.log`, what it printed in all its attempts, and `attempts.json`:

    command     the command line
    state       running, finished, failed or interrupted
    exit_code   of the last attempt; null while it runs
    attempts    how often it was started
    seconds     wall time of all attempts
    started, ended  UTC, of the first start and of the last end

All processes are started and watched by one thread: the kernel takes the end of the thread that started a process for
the end of its parent.
"""

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from types import FrameType
from typing import IO, Any

from cleanrl_utils import EXIT_INTERRUPTED, EXIT_PREEMPTED, STOP_SIGNALS
from cleanrl_utils.config import Fault, UsageError, parse, require

OWN_FLAGS = ("--env-id", "--seed", "--exp-name", "--run-name", "--resume")  # given by the tools
PROBE_LIMIT = 120.0  # seconds for a script's --help
LINE = re.compile(r"step (\d+)/(\d+)  SPS (\d+)  left (\d+):(\d+):(\d+)  mean return (-?[\d.]+|-)(?!\S)")
_libc = ctypes.CDLL(None)


# === Commands =========================================================================================================
def split(command: str, own_flags: Sequence[str]) -> list[str]:
    """The words of a command line; a usage error where only a shell could run it, or where it has one of `own_flags`.

    The error names the word at fault and not the command, in which somebody may have written a key.
    """
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        found = list(lexer)
    except ValueError as error:
        raise UsageError(f"--command: {error}") from None
    shell = [word for word in found if word and not word.strip("();<>|&")]
    shell += re.findall(r"`|\$[\w{(]\S*", command) + ["\\n"] * ("\n" in command.strip())
    rule = f"runs without a shell, which `{shell[0] if shell else ''}` needs; put that into a script of its own"
    require(shell == [], "--command", "", rule)
    for word in found:
        flag = word.partition("=")[0].replace("_", "-")
        require(flag not in own_flags, "--command", "", f"must be without {flag}, which each run gets from here")
    return found


def words(command: str) -> list[str]:
    """The words of a command line that can be run here."""
    found = split(command, OWN_FLAGS)
    require(found != [], "--command", repr(command), "must be a command line")
    rule = f"set {found[0].partition('=')[0]} before `python -m ...`; the runs inherit it"
    require(re.match(r"[A-Za-z_]\w*=", found[0]) is None, "--command", "", rule)
    require(shutil.which(program(found)[0]) is not None, "--command", "", f"there is no program {found[0]}")
    script = _script(found)
    there = script is None or os.path.exists(found[script])
    require(there, "--command", "", f"there is no file {found[script or 0]} in {os.getcwd()}")
    return found


def program(line: list[str]) -> list[str]:
    """What is started for a command line: `python` is this Python, and `torchrun` goes through `cleanrl_utils.launch`.

    The launcher lets an iteration end before it stops, and keeps the script's exit code.
    """
    if line[0] in ("python", "python3"):
        return [sys.executable, *line[1:]]
    if os.path.basename(line[0]) == "torchrun" and _script(line) is not None:
        return [sys.executable, "-m", "cleanrl_utils.launch", *line[1:]]
    return line


def _script(line: list[str]) -> int | None:
    """The position of the script among the words."""
    return next((i for i, word in enumerate(line) if word.endswith(".py")), None)


def experiment(line: list[str]) -> str:
    """The name of the experiment that the scripts would choose: the script's file name, or the module's."""
    position = _script(line)
    if position is None and "-m" in line[:-1]:
        return line[line.index("-m") + 1].rpartition(".")[2]
    return os.path.splitext(os.path.basename(line[position or 0]))[0]


def flags_of(line: list[str]) -> set[str]:
    """The flags that a command's `--help` names; none where it has no help."""
    position = _script(line)
    if position is not None:
        python = line[0] if "python" in os.path.basename(line[0]) else "python"
        line = [python, line[position]]
    elif "-m" in line[:-1]:
        line = line[: line.index("-m") + 2]
    try:
        done = subprocess.run(
            [*program(line), "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_LIMIT,
            env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", done.stdout)}


def own_flags(flags: set[str], env_id: str, seed: int, exp_name: str, run_name: str) -> list[str]:
    """What tells a script which run it is, as far as it has the flags."""
    given = ["--env-id", env_id, "--seed", str(seed)]
    given += ["--exp-name", exp_name] * ("--exp-name" in flags) + ["--run-name", run_name] * ("--run-name" in flags)
    return given + ["--resume"] * ({"--run-name", "--resume"} <= flags)


# === Places ===========================================================================================================
@dataclass(frozen=True)
class Place:
    """What a run may use of the machine."""

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them; () where the machine has none

    def __str__(self) -> str:
        parts = [f"cores {_ranges(self.cores)}" * bool(self.cores), f"GPU {','.join(self.gpus)}" * bool(self.gpus)]
        return ", ".join(filter(None, parts))


def places(workers: int) -> list[Place]:
    """The cores and GPUs that this process may use, dealt out; more workers than there are share them in turn."""
    return [Place(c, g) for c, g in zip(deal(cores(), workers), deal(gpus(), workers), strict=True)]


def cores() -> list[int]:
    """The cores that this process may use; none where no system tells: a Mac, which can only send jobs."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))  # as CUDA: -1 ends it
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(i) for i in range(len(re.findall(r"^GPU \d+:", listed, re.M)))]


def deal(items: list[Any], workers: int) -> list[tuple]:
    """Equal shares of the items, or one each in turn where there are fewer than workers."""
    if len(items) < workers:
        return [(items[i % len(items)],) if items else () for i in range(workers)]
    ends = [len(items) * i // workers for i in range(workers + 1)]
    return [tuple(items[a:b]) for a, b in itertools.pairwise(ends)]


def _ranges(numbers: tuple[int, ...]) -> str:
    """
    >>> _ranges((0, 1, 2, 5, 7, 8))
    '0-2,5,7-8'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


# === Runs =============================================================================================================
@dataclass(frozen=True)
class Progress:
    """The newest of a script's progress lines."""

    step: int
    total: int
    sps: int
    left: float  # seconds
    mean_return: float | None

    @property
    def shown_return(self) -> str:
        return "-" if self.mean_return is None else f"{self.mean_return:.1f}"


def progress(log: str) -> Progress | None:
    """What the newest progress line of a log says.

    >>> progress("step 16384/10000000  SPS 350  left 7:55:28  mean return 1.25")
    Progress(step=16384, total=10000000, sps=350, left=28528.0, mean_return=1.25)
    """
    lines = LINE.findall(log)
    if not lines:
        return None
    step, total, sps, hours, minutes, seconds = map(int, lines[-1][:6])
    mean = lines[-1][6]
    return Progress(step, total, sps, 3600.0 * hours + 60 * minutes + seconds, None if mean == "-" else float(mean))


def tail(path: str, lines: int = 200, start: int = 0) -> str:
    """The last lines of a log, of what was written from the byte `start` on."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - 1000 * lines))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


class Run:
    """One run of a script.

    `state` is as in attempts.json, or waiting, elsewhere (another tool has it), stopping, or skipped (finished before).
    """

    def __init__(self, name: str, line: list[str]):
        self.name, self.line, self.command = name, line, shlex.join(line)
        self.folder = f"runs/{name}"
        self.log = f"{self.folder}/run.log"
        self.state, self.exit_code = "waiting", 0
        self.place: Place | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False
        self._began, self._offset = 0.0, 0
        self._ended: float | None = None

    @property
    def record(self) -> dict[str, Any]:
        """attempts.json; {} where there is none that can be read."""
        try:
            with open(f"{self.folder}/attempts.json") as file:
                found = json.load(file)
                return found if isinstance(found, dict) and "command" in found else {}
        except (OSError, ValueError):
            return {}

    @property
    def others(self) -> str | None:
        """Another command that this run was begun with. One that the script refused has left nothing."""
        before = self.record
        same = before.get("command", self.command) == self.command
        return None if same or before.get("exit_code") == 2 else before["command"]

    @property
    def finished(self) -> bool:
        before = self.record
        return before.get("state") == "finished" and before["command"] == self.command

    def start(self, place: Place) -> bool:
        """Start it, or continue it if the command can. False if it need not be, or another tool has it just now."""
        os.makedirs(self.folder, exist_ok=True)
        log = open(self.log, "ab")  # noqa: SIM115
        try:
            # The lock is the open file's: the run holds it as long as it lives, also without the tool that started it.
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.state = "elsewhere"
            log.close()
            return False
        if self.finished:
            self.state = "skipped"
            log.close()
            return False
        before = self.record
        if before.get("command") != self.command:
            before = {}
        self._saved = {
            "command": self.command,
            "state": "running",
            "exit_code": None,
            "attempts": before.get("attempts", 0) + 1,
            "seconds": before.get("seconds", 0.0),
            "started": before.get("started", _now()),
            "ended": None,
        }
        self._write()
        log.write(f"$ {self.command}\n".encode())
        log.flush()
        self._log, self._offset, self._asked = log, log.tell(), False
        self._began, self._ended, self.place = time.monotonic(), None, place
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if place.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
        try:
            self._process = subprocess.Popen(
                program(self.line),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C comes from here, once
                preexec_fn=_prepare(place.cores),
            )
        except OSError as error:
            log.close()
            raise Fault(f"can't start {self.command}: {error}") from None
        self.state = "running"
        return True

    def poll(self) -> bool:
        """Whether it has ended. Then `state` and `exit_code` say how, and nobody of its process group is left."""
        if self._process is None:
            return True
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # before its number is free: what a crash has left behind
        self.exit_code, self._ended = self._process.wait(), time.monotonic()
        preempted = self._asked or self.exit_code in (EXIT_PREEMPTED, EXIT_INTERRUPTED)
        self.state = "finished" if self.exit_code == 0 else "interrupted" if preempted else "failed"
        self._saved |= {"state": self.state, "exit_code": self.exit_code, "ended": _now()}
        self._saved["seconds"] = round(self._saved["seconds"] + self.seconds, 1)
        self._process = None
        self._write()
        self._log.close()
        return True

    def stop(self) -> None:
        """Ask it to end; scripts that can write a checkpoint. `poll` says when it has."""
        if self._process is not None and not self._asked:
            self._asked, self.state = True, "stopping"
            os.kill(self._process.pid, signal.SIGTERM)  # Popen's own way would reap it, which `poll` does

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._asked = True
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def seconds(self) -> float:
        """Wall time of this attempt."""
        return (self._ended or time.monotonic()) - self._began

    @property
    def progress(self) -> Progress | None:
        """The newest progress line of this attempt."""
        return progress(tail(self.log, 100, self._offset))

    @property
    def how_it_ended(self) -> str:
        """The exit code, and by which signal."""
        if self.exit_code < 0:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        return f"exit code {self.exit_code}"

    def tail(self, lines: int = 10) -> str:
        """The log's last lines, indented."""
        return textwrap.indent(tail(self.log, lines), "    ")

    def events(self) -> str | None:
        """The folder of its TensorBoard events; also of scripts that name it by themselves, after --exp-name."""
        import glob

        value = dict(zip(self.line, self.line[1:], strict=False))
        if "--run-name" in value:
            return self.folder
        name = f"{value['--env-id'].replace('/', '-')}__{value.get('--exp-name', experiment(self.line))}"
        found = glob.glob(f"runs/{glob.escape(name)}__{value['--seed']}__*")
        return max(found, key=os.path.getmtime, default=None)

    def _write(self) -> None:
        path = f"{self.folder}/attempts.json"
        with open(f"{path}.tmp", "w") as file:
            json.dump(self._saved, file, indent=2)
        os.replace(f"{path}.tmp", path)


def _prepare(cores: tuple[int, ...]) -> Callable[[], None]:
    """In the child: its cores, and the kernel tells it to stop when this process is gone, however that ended."""
    parent = os.getpid()

    def prepare() -> None:
        PR_SET_PDEATHSIG = 1
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        os.sched_setaffinity(0, cores)

    return prepare


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def clock(seconds: float) -> str:
    """
    >>> clock(3723.4)
    '1:02:03'
    """
    return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02}:{int(seconds % 60):02}"


# === Stopping =========================================================================================================
class StopRequest:
    """Notes the signals by which a tool is told to stop. A second Ctrl-C means at once."""

    def __init__(self) -> None:
        self.received: list[int] = []
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # Ctrl-C, for what a script has started by &
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def __bool__(self) -> bool:
        return bool(self.received)

    def pass_on(self, active: list[Run]) -> None:
        """Tell the runs."""
        for run in active:
            run.kill() if self.received.count(signal.SIGINT) > 1 else run.stop()

    @property
    def exit_code(self) -> int:
        return EXIT_INTERRUPTED if self.received[:1] == [signal.SIGINT] else EXIT_PREEMPTED


def end_all(active: list[Run]) -> None:
    """Whatever happened to the tool: its runs are told to stop, and waited for."""
    for run in active:
        run.stop()
    while not all(run.poll() for run in active):
        time.sleep(0.1)


@contextlib.contextmanager
def whole_file(path: str, mode: str = "w") -> Iterator[IO[Any]]:
    """A file that appears once all of it is written, also where several processes write it at once."""
    part = f"{path}.{secrets.token_hex(4)}"
    try:
        with open(part, mode, newline="" if mode == "w" else None) as file:
            yield file
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


def tool(main: Callable[[Any], int | None], args_class: type, argv: list[str]) -> int:
    """A tool's exit code: `main`'s, 0 if it returns none; 2 or 1, with one line, if the user can or can't mend it."""
    try:
        return main(parse(args_class, argv)) or 0
    except (UsageError, Fault, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:  # before there was a run to stop
        return EXIT_INTERRUPTED
