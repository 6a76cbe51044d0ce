"""The launcher: whose exit code, which signals, and nobody left; restarts; two jobs that want one folder."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import MULTI, PATIENCE, ROOT, alive, children, final, free_port, kill_group, scalars, wait_until

FLAGS = [*("--num-envs", 2, "--num-steps", 32, "--num-minibatches", 2, "--update-epochs", 2, "--num-threads", 1)]
NAMED = [*FLAGS, "--run-name", "run", "--checkpoint-every", 2]
TWO = ["--standalone", "--nproc_per_node=2"]


class Job:
    """A launched job: its process, and what it has said so far."""

    def __init__(self, folder, options, *flags, **env):
        argv = [sys.executable, "-m", "cleanrl_utils.launch", *options, str(ROOT / MULTI), *map(str, flags)]
        self.process = folder.start(argv, PYTHONPATH=str(ROOT), **env)
        self.said = []
        self.reader = threading.Thread(target=lambda: self.said.extend(iter(self.process.stderr.readline, "")))
        self.reader.start()

    def wait_for(self, words):
        wait_until(
            lambda: any(line.startswith(words) for line in self.said) or self.process.poll() is not None,
            PATIENCE,
            words,
        )
        assert self.process.poll() is None, self.said

    def end(self, seconds=PATIENCE):
        """Its exit code, with nobody left."""
        self.process.wait(seconds)
        self.reader.join(PATIENCE)
        return self.process.returncode


@pytest.fixture
def launch(folder):
    jobs, families = [], set()

    def start(options, *flags, **env):
        jobs.append(Job(folder, options, *flags, **env))
        return jobs[-1]

    def look():
        while jobs is not None and not done.is_set():
            for job in jobs:
                families.update(children(job.process.pid))
            time.sleep(0.1)

    done = threading.Event()
    watcher = threading.Thread(target=look)
    watcher.start()
    yield start
    done.set()
    watcher.join()
    try:
        wait_until(lambda: not any(map(alive, families)), 30, "nobody is left")
    finally:
        for job in jobs:
            kill_group(job.process)
        for pid in families:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_signals_end_the_job_after_its_iteration(launch):
    """One run in four starts: SIGUSR1, what schedulers and terminals send to everybody at once, Ctrl-C."""
    for send, code in ((signal.SIGUSR1, 75), (signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)):
        job = launch(TWO, *NAMED, "--resume")
        job.wait_for("step ")
        if send in (signal.SIGTERM, signal.SIGHUP):
            for pid in [job.process.pid, *children(job.process.pid)]:
                with contextlib.suppress(ProcessLookupError):  # it has heard of it, and ended, by then
                    os.kill(pid, send)
        else:
            job.process.send_signal(send)
        assert job.end() == code
        stops = [line for line in job.said if line.startswith("stopped after iteration ")]
        assert len(stops) == 1, (send, job.said)
        iteration = int(stops[0].split()[3].rstrip(";"))
        assert any(f"checkpoint-{iteration:08}.pt" in line for line in job.said), job.said


def test_the_exit_code_is_the_script_s(launch, folder):
    done = launch(TWO, *FLAGS, "--total-timesteps", 256)
    assert done.end() == 0 and final(done.process.stdout.read())[0] == 256
    assert launch(TWO, *FLAGS, "--gamma", 3).end() == 2
    killed = launch(TWO, *FLAGS)
    killed.wait_for("step ")
    workers = children(children(killed.process.pid)[0])
    os.kill(workers[0], signal.SIGKILL)
    assert killed.end(60) == 1


def test_one_process_needs_no_torchrun(launch):
    """And under nohup it leaves SIGHUP alone: the first signal that it hears decides about the exit code."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    job = launch([], *NAMED)
    signal.signal(signal.SIGHUP, handler)
    job.wait_for("step ")
    (worker,) = children(job.process.pid)
    assert "torch.distributed.run" not in Path(f"/proc/{worker}/cmdline").read_text()
    for pid in (job.process.pid, worker):
        os.kill(pid, signal.SIGHUP)
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130 and any(line.startswith("stopped after iteration") for line in job.said)


@pytest.mark.parametrize("who", ["launcher", "torchrun"])
def test_nobody_outlives_a_killed_parent(launch, who):
    """The fixture looks for those who are left. Of a killed launcher the job itself ends with a checkpoint."""
    job = launch(TWO, *NAMED)
    job.wait_for("step ")
    torchrun = children(job.process.pid)[0]
    if who == "torchrun":
        os.kill(torchrun, signal.SIGKILL)
        assert job.end() == 137
    else:
        job.process.kill()
        job.reader.join(PATIENCE)
        assert any(line.startswith("stopped after iteration") for line in job.said), job.said


def test_a_torchrun_killed_before_the_script_has_begun_leaves_nobody(folder):
    """As long as they import torch, its processes don't end with it."""
    (folder.path / "importing.py").write_text(
        "import os, time\nopen(f'{os.getpid()}.pid', 'w').close()\ntime.sleep(100)\n"
    )
    argv = [sys.executable, "-m", "cleanrl_utils.launch", *TWO, "importing.py"]
    job = folder.start(argv, PYTHONPATH=str(ROOT))
    try:
        wait_until(lambda: len(list(folder.path.glob("*.pid"))) == 2, 120, "two processes")
        os.kill(children(job.pid)[0], signal.SIGKILL)
        assert job.wait(30) == 137
        wait_until(lambda: not any(alive(int(file.stem)) for file in folder.path.glob("*.pid")), 10, "nobody is left")
    finally:
        kill_group(job)
        for file in folder.path.glob("*.pid"):
            if alive(int(file.stem)):
                os.kill(int(file.stem), signal.SIGKILL)


def test_torchrun_s_restart_continues_the_run(launch):
    job = launch([*TWO, "--max-restarts=2"], *NAMED)
    job.wait_for("checkpoint: ")
    workers = children(children(job.process.pid)[0])
    os.kill(workers[1], signal.SIGKILL)
    job.wait_for("run: runs/run, from step ")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75, job.said


def test_a_job_on_one_machine_uses_the_port_that_torchrun_has_opened(folder, monkeypatch):
    """Where nodes come and go it can't."""
    from cleanrl_utils import launch

    def start(line, env, preexec_fn):
        own.append("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in env)
        return SimpleNamespace(wait=lambda: 0)

    own = []
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(Popen=start))
    for options in (TWO, ["--nnodes=1:2", "--rdzv-backend=c10d"]):
        assert folder.here(lambda line: sys.exit(launch.main(line)), [*options, "a.py"]) == 0
    assert own == [False, True]


@pytest.mark.slow
def test_machines_leave_and_join(launch, folder):
    """Two agents, of which one is killed, comes back, and is preempted: the other goes on, with all environments."""
    options = ["--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
    port = free_port()
    options.append(f"--rdzv-endpoint=127.0.0.1:{port}")
    first = launch(options, *NAMED)

    def met():
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True

    wait_until(met, PATIENCE, "the rendezvous, which is the first one's")
    second = launch(options, *NAMED)
    first.wait_for("checkpoint: ")
    os.kill(children(second.process.pid)[0], signal.SIGKILL)
    first.wait_for("notice: continued within rounding, not bit for bit: processes 2 -> 1")
    first.wait_for("run: runs/run, from step ")
    third = launch(options, *NAMED)
    first.wait_for("notice: continued within rounding, not bit for bit: processes 1 -> 2")
    first.said.clear()
    first.wait_for("step ")
    first.said.clear()
    third.process.send_signal(signal.SIGTERM)
    assert third.end() == 75
    first.wait_for("stopped after iteration ")
    first.wait_for("run: runs/run, from step ")
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 75
    second.end()
    steps = [step for step, _ in scalars(f"{folder.path}/runs/run")["charts/SPS"]]
    assert steps == [4 * 32 * i for i in range(1, len(steps) + 1)], "none twice, none missing, always 4 environments"


def test_a_folder_in_use_is_waited_for_or_refused(folder, monkeypatch):
    """A resumed job waits for the end of the one before it, but not for ever."""
    import ppo_atari
    from cleanrl_utils import checkpoint
    from cleanrl_utils.config import UsageError

    monkeypatch.chdir(folder.path)
    os.makedirs("runs/run")
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, time; f = open('runs/run/.lock', 'a'); fcntl.flock(f, 2); time.sleep(900)",
        ]
    )
    try:

        def locked():
            if not os.path.exists("runs/run/.lock"):
                return False
            with open("runs/run/.lock") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
            return False

        wait_until(locked, PATIENCE, "the other job has the folder")
        monkeypatch.setattr(checkpoint, "LOCK_WAIT", 0.5)
        args = ppo_atari.Args(run_name="run", resume=True)
        with pytest.raises(UsageError, match=r"another job has been using .*/runs/run for"):
            checkpoint.load_checkpoint(args)
        monkeypatch.setattr(checkpoint, "LOCK_WAIT", float(PATIENCE))
        threading.Timer(1.0, holder.kill).start()
        assert checkpoint.load_checkpoint(args) == (args, {})
    finally:
        holder.kill()
        holder.wait()
        checkpoint._locks.clear()
