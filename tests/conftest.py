"""Helpers: run scripts as users do, in a folder of their own, and read what they wrote."""

import contextlib
import glob
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
sys.path[:0] = [str(ROOT), str(ROOT / "results")]  # the tests import the scripts, and ablation.py
# What torchrun, a scheduler, a git hook, make or a user's settings change, here and in what is started from here
SETTINGS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "PET_", "SLURM_", "CLEANRL_", "WANDB_")
OTHERS = ("AWS_", "HF_", "TRANSFORMERS_", "GIT_", "MAKE", "FORCE_COLOR")
for name in [name for name in os.environ if name.startswith((*SETTINGS, *OTHERS))]:
    del os.environ[name]
os.environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}  # which may ask for signed commits
os.environ |= {"NO_PROXY": "localhost,127.0.0.1", "no_proxy": "localhost,127.0.0.1"}
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup has started the suite
os.environ["OMP_NUM_THREADS"] = "1"  # two workers of pytest share the cores; torch reads it at its import

from recorded_run import record, record_in_worker  # noqa: E402

from cleanrl_utils import checkpoint  # noqa: E402
from cleanrl_utils.process import HEARD  # noqa: E402

FORKSERVER = multiprocessing.get_context("forkserver")
PRELOAD = ["torch._dynamo", "torch.distributed.nn.functional", "torch.utils.tensorboard"]  # what runs import later on
FORKSERVER.set_forkserver_preload(["recorded_run", "ppo_atari_multigpu", *PRELOAD])
SINGLE, MULTI = "ppo_atari.py", "ppo_atari_multigpu.py"
SMALL = ["--num-steps", "16", "--num-minibatches", "2", "--update-epochs", "2"]
PATIENCE = 240  # seconds, where a few are enough on an idle machine and what hangs would take for ever


def environment(**more):
    """This process's environment without what a test has set for the scripts that it runs in this process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


def command(script, *flags, nproc=None):
    """A script's command line, alone or under torchrun with nproc processes."""
    path = str(ROOT / script) if not os.path.isabs(script) else script
    launcher = [sys.executable]
    if nproc:
        launcher = [str(BIN / "torchrun"), "--standalone", "--nnodes=1", f"--nproc_per_node={nproc}"]
    return [*launcher, path, *map(str, flags)]


class Folder:
    """A working folder in which commands run."""

    def __init__(self, path):
        self.path = Path(path)

    def start(self, argv, **env):
        return subprocess.Popen(
            argv,
            cwd=self.path,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, argv, code=0, timeout=PATIENCE, **env):
        """Run to the end; the finished process, whose exit code must be `code`."""
        done = subprocess.run(
            argv,
            cwd=self.path,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == code, f"{argv}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def recorded(self, script, out, *flags, nproc=None):
        """Run a script through recorded_run.py, one process in this one: its records by process.

        Several processes are forked from one that has imported everything, a fifth of the time of torchrun's start.
        """
        path = str(ROOT / script) if not os.path.isabs(script) else script
        if nproc:
            shared = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1"}
            shared |= {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
            workers = []
            for rank in range(nproc):
                env = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
                work = (env, str(self.path), path, out, list(map(str, flags)))
                workers.append(FORKSERVER.Process(target=record_in_worker, args=work))
                workers[-1].start()
            for worker in workers:
                worker.join(PATIENCE)
            codes = [worker.exitcode for worker in workers]
            for worker in workers:
                worker.kill()
            assert codes == [0] * nproc, f"{script} {flags}: exit codes {codes}"
        else:
            assert self.here(record, path, out, list(map(str, flags))) == 0
        return [np.load(self.path / out / f"rank{rank}.npz") for rank in range(nproc or 1)]

    def here(self, function, *args):
        """Call what ends by SystemExit, in this folder: the exit code."""
        cwd, argv, handlers = os.getcwd(), sys.argv, {number: signal.getsignal(number) for number in HEARD}
        os.chdir(self.path)
        try:
            function(*args)
        except SystemExit as leave:
            return leave.code
        finally:
            os.chdir(cwd)
            sys.argv = argv
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for lock in checkpoint._locks.values():
                lock.close()
            checkpoint._locks.clear()

    def event_folders(self):
        return sorted(os.path.dirname(f) for f in glob.glob(f"{self.path}/runs/**/events*", recursive=True))


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.fixture
def offline_wandb(monkeypatch):
    """W&B offline, in this test's folder: it stays in the one in which a process has first used it, until it is ended.

    Call it to end W&B, which then has written its files.
    """
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    yield wandb.teardown
    wandb.teardown()


def scalars(event_folder):
    """{tag: [(step, value), ...]} of an event folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(event_folder, size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def final(output):
    """The param_sum and global_step of a script's last line."""
    (line,) = [line for line in output.splitlines() if line.startswith("final: ")]
    fields = dict(word.split("=") for word in line.split()[1:])
    return int(fields["global_step"]), float(fields["param_sum"])


def free_port():
    """A port that is free, and of those that the kernel gives to nobody by itself: it is still free when it is used."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", random.SystemRandom().randrange(first // 2, first)))
            return s.getsockname()[1]


def children(pid):
    """The pids of a process's children, their children too."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return own + [grandchild for child in own for grandchild in children(child)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: gone since it was opened
        return False


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def kill_group(process):
    """End what a test started, whatever became of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


LONGEST_FIRST = ("launch", "checkpoint", "learning", "readme", "distributed", "logging", "invariance", "tune", "docs")


def pytest_collection_modifyitems(items):
    """The files that take longest first, so that at the end no process waits for the other's last file."""
    order = [f"test_{name}.py" for name in LONGEST_FIRST]
    items.sort(key=lambda item: order.index(item.path.name) if item.path.name in order else len(order))
