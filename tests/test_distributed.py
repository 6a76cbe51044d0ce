"""Devices, threads, agreement, and the end of jobs whose processes end."""

import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    BIN,
    MULTI,
    PATIENCE,
    ROOT,
    SINGLE,
    SMALL,
    alive,
    children,
    command,
    final,
    free_port,
    kill_group,
    wait_until,
)

import ppo_atari
from cleanrl_utils import process
from cleanrl_utils.config import UsageError

TINY = ["--num-envs", 2, "--total-timesteps", 2 * 2 * 16 * 2, *SMALL]  # two iterations on two processes
ENDLESS = ["--num-envs", 2, *SMALL]


@pytest.fixture
def gpus(monkeypatch):
    """A machine with as many GPUs as said; what device was set."""

    def pretend(count, **env):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        for key, value in env.items():
            monkeypatch.setenv(key, str(value))

    chosen = []
    return pretend


def pick(local_rank, backend=None, device_ids=(), cuda=True):
    return str(process.pick_device(cuda, local_rank, backend, device_ids))


def test_the_local_rank_chooses_the_gpu(gpus):
    gpus(8, WORLD_SIZE=16, LOCAL_WORLD_SIZE=8)
    assert [pick(local_rank, "nccl") for local_rank in (0, 1, 7)] == ["cuda:0", "cuda:1", "cuda:7"]
    assert pick(1, cuda=False) == "cpu"


def test_the_local_rank_is_enough(gpus):
    """srun and mpirun users often set it without LOCAL_WORLD_SIZE."""
    gpus(8, LOCAL_RANK=1, WORLD_SIZE=16)
    assert pick(1) == pick(1, "nccl") == "cuda:1"


def test_device_ids_are_per_machine(gpus):
    gpus(4, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2)
    assert [pick(local_rank, device_ids=(2, 3)) for local_rank in (0, 1)] == ["cuda:2", "cuda:3"]
    for wrong in ((2,), (0, 1, 2, 3), (0, -1), (0, 4)):
        with pytest.raises(UsageError, match="--device-ids"):
            pick(0, device_ids=wrong)


def test_more_processes_than_gpus_share_them_over_gloo(gpus, capsys):
    gpus(2, WORLD_SIZE=3, LOCAL_WORLD_SIZE=3, RANK=0)
    assert [pick(local_rank) for local_rank in (0, 1, 2)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert "3 processes share 2 GPU(s), over gloo" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--backend nccl: 3 processes can't share 2"):
        pick(0, "nccl")


def test_no_gpu(gpus):
    gpus(0)
    assert pick(0) == "cpu"
    with pytest.raises(UsageError, match="--backend nccl: needs CUDA"):
        pick(0, "nccl")


def threads(monkeypatch, num_threads=None, **env):
    for key in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(key, raising=False)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(process, "die_with_parent", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    process.prepare_process(num_threads)
    return chosen


def test_each_process_takes_its_share_of_the_cores(monkeypatch):
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}
    assert threads(monkeypatch) == [8]
    assert threads(monkeypatch, OMP_NUM_THREADS="3") == [], "the user's own number, which torch reads by itself"
    assert threads(monkeypatch, **torchrun, OMP_NUM_THREADS="1") == [4], "torchrun's 1 means that nobody set it"
    assert threads(monkeypatch, **torchrun, OMP_NUM_THREADS="2") == []
    assert threads(monkeypatch, 5, **torchrun, OMP_NUM_THREADS="2") == [5]


def test_the_whole_gradient_is_clipped(folder):
    """Gradients (3, 4) and (-3, 4): SUM of halves is (0, 4), of norm 4, clipped to (0, 0.5) on both. By the script's
    own lines."""
    source = (ROOT / MULTI).read_text()
    (reduce,) = re.findall(r"^ +(all_reduce\(flat_grad.*)$", source, re.M)
    (clip,) = re.findall(r"^ +(flat_grad \*= .*)$", source, re.M)
    assert source.index(reduce) < source.index(clip)
    (folder.path / "clip.py").write_text(
        "import os, types, torch, torch.distributed as dist\n"
        "from cleanrl_utils.shared_memory import AllReduce\n"
        "dist.init_process_group('gloo'); rank = dist.get_rank()\n"
        "args = types.SimpleNamespace(max_grad_norm=0.5)\n"
        "flat_grad = torch.tensor([[3.0, 4.0], [-3.0, 4.0]][rank]) / 2\n"
        "all_reduce = AllReduce(flat_grad, None)\n"
        f"{reduce}\n{clip}\n"
        "assert torch.allclose(flat_grad, torch.tensor([0.0, 0.5]), atol=1e-5), flat_grad\n"
        "open(f'ok{rank}', 'w'); dist.destroy_process_group()\n"
    )
    folder.run(command(str(folder.path / "clip.py"), nproc=2))
    assert (folder.path / "ok0").exists() and (folder.path / "ok1").exists()


def agents(folder, script, *flags, nproc=1, per_agent=({}, {}), extra=((), ())):
    """Two torchrun agents with static rendezvous on this host, as on two machines: both ended processes."""
    port = free_port()
    started = [
        folder.start(
            [
                *(str(BIN / "torchrun"), "--nnodes=2", f"--node_rank={node}", f"--nproc_per_node={nproc}"),
                *("--master_addr=127.0.0.1", f"--master_port={port}"),
                *(str(ROOT / script), *map(str, flags), *map(str, extra[node])),
            ],
            **per_agent[node],
        )
        for node in (0, 1)
    ]
    results = {}

    def finish(node):
        results[node] = started[node].communicate(timeout=PATIENCE)

    waiting = [threading.Thread(target=finish, args=(node,)) for node in (0, 1)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    return [(started[node].returncode, *results[node]) for node in (0, 1)]


def test_two_agents_of_one_process_are_one_job(folder):
    """LOCAL_RANK is 0 on both: one of them logs, and the run is that of one process."""
    (code0, out0, err0), (code1, out1, err1) = agents(folder, MULTI, *TINY, "--num-threads", 1)
    assert code0 == code1 == 0, err0 + err1
    assert len(folder.event_folders()) == 1 and len(os.listdir(folder.path / "runs")) == 1
    assert out1 == "" and err1.count("run: ") == 0
    alone = folder.run(command(MULTI, *TINY, "--num-envs", 4, "--num-threads", 1))
    assert final(out0)[0] == final(alone.stdout)[0] == 128
    assert final(out0)[1] == pytest.approx(final(alone.stdout)[1], abs=1e-3)


def test_different_arguments_are_an_error_on_all(folder):
    results = agents(folder, MULTI, *SMALL, extra=(["--num-envs", 2], ["--num-envs", 3]))
    assert all(code != 0 for code, _, _ in results)
    said = "".join(err for _, _, err in results)
    assert said.count("error: --num-envs: process 0 was started with 2, process 1 with 3") == 1
    assert os.listdir(folder.path) == []


def test_two_jobs_at_once_share_nothing(folder):
    """The README's command twice in the same second: no port and no folder is shared."""
    jobs = [folder.start(command(MULTI, *TINY, nproc=2)) for _ in range(2)]
    outputs = [job.communicate(timeout=PATIENCE) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert len(os.listdir(folder.path / "runs")) == 2


def test_total_steps_do_not_depend_on_the_processes(folder):
    """The same total is split over iterations of the whole job."""
    flags = ["--num-envs", 2, "--num-steps", 64, "--num-minibatches", 2, "--update-epochs", 1, "--total-timesteps", 512]
    one, two = folder.run(command(MULTI, *flags)), folder.run(command(MULTI, *flags, nproc=2))
    assert final(one.stdout)[0] == final(two.stdout)[0] == 512


def running_job(folder):
    """A job of two processes that has begun to train: (torchrun, its workers' pids)."""
    job = folder.start(command(MULTI, *ENDLESS, nproc=2))
    lines = []
    threading.Thread(target=lambda: lines.extend(iter(job.stderr.readline, "")), daemon=True).start()
    wait_until(lambda: any(line.startswith("step ") for line in lines), PATIENCE, "the first iteration")
    workers = [pid for pid in children(job.pid) if MULTI in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    return job, workers


def events_are_readable(folder):
    from conftest import scalars

    (event_folder,) = folder.event_folders()
    return len(scalars(event_folder).get("losses/value_loss", []))


def test_a_killed_process_ends_the_job(folder):
    job, workers = running_job(folder)
    try:
        os.kill(workers[1], signal.SIGKILL)
        wait_until(lambda: job.poll() is not None, 60, "torchrun ends")
        assert job.returncode != 0
        wait_until(lambda: not any(map(alive, workers)), 30, "nobody is left")
    finally:
        kill_group(job)


@pytest.mark.parametrize("to", ["torchrun", "everyone"])
def test_ctrl_c_leaves_nobody(folder, to):
    """A terminal signals everyone at once, and torchrun passes it on as well."""
    job, workers = running_job(folder)
    try:
        if to == "torchrun":
            os.kill(job.pid, signal.SIGINT)
        else:
            os.killpg(job.pid, signal.SIGINT)
        wait_until(lambda: job.poll() is not None, 60, "torchrun ends")
        assert job.returncode != 0
        wait_until(lambda: not any(map(alive, workers)), 30, "nobody is left")
        assert events_are_readable(folder) >= 1
    finally:
        kill_group(job)


def test_workers_do_not_outlive_a_killed_torchrun(folder):
    job, workers = running_job(folder)
    try:
        os.kill(job.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, workers)), 30, "nobody is left")
    finally:
        kill_group(job)


def test_ctrl_c_alone_is_130_without_a_traceback(folder):
    job = folder.start(command(MULTI, "--num-envs", 2, *SMALL, "--vector-env", "async"))
    try:
        while not job.stderr.readline().startswith("step "):
            assert job.poll() is None
        workers = children(job.pid)
        assert workers
        os.killpg(job.pid, signal.SIGINT)
        _, err = job.communicate(timeout=60)
        assert job.returncode == 130 and "Traceback" not in err, err
        wait_until(lambda: not any(map(alive, workers)), 30, "nobody is left")
        assert events_are_readable(folder) >= 1
    finally:
        kill_group(job)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stop_before_or_after_the_training_is_one_line(number, code, folder, monkeypatch, capsys):
    def stopped_before(args, on_exit):
        os.kill(os.getpid(), number)

    def stopped_at_once(code):
        if code is None:
            os.kill(os.getpid(), number)

    def stopped_after(args, on_exit):
        process.StopSignal()
        on_exit.callback(os.kill, os.getpid(), number)

    monkeypatch.setattr("sys.argv", [SINGLE])
    for main, says in (
        (stopped_before, "before the training began: there is"),
        (stopped_after, "after the training, "),
    ):
        monkeypatch.setattr(process.StopSignal, "received", [])
        assert folder.here(process.run, main, ppo_atari.Args, SINGLE) == code
        err = capsys.readouterr().err
        assert err.startswith(f"stopped {says}") and err.count("\n") == 1, err
    monkeypatch.setattr(process.StopSignal, "received", [])
    monkeypatch.setattr(process, "_write_status", stopped_at_once)
    assert folder.here(process.run, stopped_after, ppo_atari.Args, SINGLE) == code


@pytest.mark.parametrize("met, seconds", [(False, 40), (True, 10)])
def test_who_speaks_has_time_to_speak(met, seconds, folder, monkeypatch, capsys):
    """torchrun ends a machine's processes at the first exit, and they may not have started at the same time."""
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    waited = []
    monkeypatch.setattr(process, "met", met)
    monkeypatch.setattr(process, "time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setattr("sys.argv", [SINGLE, "--gamma", "2"])
    assert folder.here(process.run, None, ppo_atari.Args, SINGLE) == 2
    assert waited == [seconds] and capsys.readouterr().err == ""


def test_a_full_disk_does_not_change_the_exit_code(folder, monkeypatch, capsys):
    """The launcher reads it from a file, and then from the process itself."""
    monkeypatch.setenv("CLEANRL_STATUS_FILE", "/dev/full")
    monkeypatch.setattr("sys.argv", [SINGLE])
    assert folder.here(process.run, lambda args, on_exit: None, ppo_atari.Args, SINGLE) == 0


def test_a_loss_that_is_not_finite_ends_all_with_one_line(folder):
    source = (ROOT / MULTI).read_text()
    right = "args.vf_coef * v_loss) / minibatch_size"
    assert source.count(right) == 1
    broken = source.replace(right, f"{right} * (float('nan') if iteration == 2 and rank == 1 else 1.0)")
    (folder.path / "broken.py").write_text(broken)
    done = folder.run(command(str(folder.path / "broken.py"), *TINY, nproc=2), code=1)
    assert done.stderr.count("error: ") == 1 and "error: iteration 2: " in done.stderr and "finite" in done.stderr


@pytest.mark.parametrize("script", [SINGLE, MULTI])
def test_a_gradient_that_is_not_finite_is_in_no_checkpoint(script, folder, capsys):
    """The iteration's last gradient: no loss has seen the weights that it makes."""
    right = "args.vf_coef * v_loss) / minibatch_size"
    last = "iteration == 2 and updates == args.update_epochs * args.num_minibatches - 1"
    broken = (ROOT / script).read_text().replace(right, f"{right} * (float('nan') if {last} else 1.0)")
    (folder.path / "broken.py").write_text(broken)

    def run():
        from recorded_run import load

        flags = ["--num-envs", 2, *SMALL, "--total-timesteps", 96, "--run-name", "r", "--checkpoint-every", 1]
        sys.argv = ["broken.py", *map(str, flags)]
        loaded = load(str(folder.path / "broken.py"))
        loaded.process.run(loaded.main, loaded.Args, "broken.py")

    assert folder.here(run) == 1
    assert "error: iteration 2: a loss or gradient is not finite" in capsys.readouterr().err
    left = os.listdir(folder.path / "runs" / "r")
    assert [name for name in left if name.startswith("checkpoint")] == ["checkpoint-00000001.pt"]


def test_the_group_is_gone_before_the_interpreter_ends(folder):
    """gloo's threads, if they are still there at the interpreter's end, now and then abort the process.

    The kernel lists a thread for a moment after it was joined. Both processes print to one pipe, unbuffered: only what
    is one argument of `print` arrives in one piece.
    """
    (folder.path / "watched.py").write_text(
        "import os, sys, time; sys.path.insert(0, sys.argv.pop(1))\n"
        "import ppo_atari_multigpu as script\n"
        "def name(thread):\n"
        "    try: return open(f'/proc/self/task/{thread}/comm').read()\n"
        "    except (FileNotFoundError, ProcessLookupError): return ''\n"
        "def gloo(): return [t for t in os.listdir('/proc/self/task') if 'gloo' in name(t)]\n"
        "def disconnect():\n"
        "    before = gloo(); original(); deadline = time.monotonic() + 30\n"
        "    while gloo() and time.monotonic() < deadline: time.sleep(0.01)\n"
        "    print(f'threads: {len(before) > 0} {len(gloo())}')\n"
        "original, script.process.disconnect = script.process.disconnect, disconnect\n"
        "script.process.run(script.main, script.Args, 'watched.py')\n"
    )
    done = folder.run(command(str(folder.path / "watched.py"), ROOT, *TINY, nproc=2))
    assert done.stdout.count("threads: True 0") == 2, done.stdout


def test_no_warnings(folder):
    done = folder.run(command(MULTI, *TINY, nproc=2))
    quiet = [line for line in done.stderr.splitlines() if line and "torch/distributed/run.py" not in line]
    assert all(line.startswith(("run: ", "step ", "checkpoint: ", "time: ")) for line in quiet), quiet
    assert done.stdout.startswith("final: ") and done.stdout.count("\n") == 1
