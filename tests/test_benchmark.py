"""The benchmark tool, with a script that trains nothing: skipped, continued, failed, stopped, killed, nobody left."""

import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import PATIENCE, ROOT, alive, children, kill_group, scalars, wait_until

from cleanrl_utils import benchmark, runs, submit_exp
from cleanrl_utils.submit.spec import split_command

FAKE = f"python {ROOT / 'tests' / 'fake_training.py'}"


def argv(command, *flags):
    return [sys.executable, "-m", "cleanrl_utils.benchmark", "--command", command, *map(str, flags)]


@pytest.fixture
def here(folder, monkeypatch, capsys):
    """Runs a tool in this process: here(tool, code, command, *flags) is what it printed, to stdout and stderr."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("WANDB_TAGS", "")

    def run(tool, code, command, *flags):
        handler = signal.getsignal(signal.SIGHUP)
        given = ["--command", command, *map(str, flags)]
        assert folder.here(lambda: sys.exit(runs.tool(tool.main, tool.Args, given))) == code, capsys.readouterr()
        signal.signal(signal.SIGHUP, handler)
        return capsys.readouterr()

    return run


def record(folder, name):
    return json.loads((folder.path / "runs" / name / "attempts.json").read_text())


def log(folder, name):
    return (folder.path / "runs" / name / "run.log").read_text()


def steps(text):
    return [int(step) for step in re.findall(r"^step (\d+)/", text, re.M)]


def test_the_rest_is_run_and_failures_are_named(folder, here):
    line = (f"{FAKE} --fail-seed 3", "--env-ids", "A", "ALE/BB", "--num-seeds", 2, "--start-seed", 2, "--workers", 2)
    first = here(benchmark, 1, *line)
    for name in ("A__fake_training__3", "ALE-BB__fake_training__3"):
        assert f"] failed {name}: exit code 1, log runs/{name}/run.log\n" in first.err
        assert re.search(rf"exit code 1, after \d:\d\d:\d\d; runs/{name}/run.log ends with\n", first.out)
        assert record(folder, name)["state"] == "failed" and record(folder, name)["exit_code"] == 1
    assert first.out.count("    the loss is not finite\n") == 2
    assert "4 runs: 2 finished, 2 failed\n" in first.out
    assert re.search(r"\[[12]/4\] running A__fake_training__3  cores \d", first.err)

    again = here(benchmark, 1, *line)
    assert "4 runs: 2 skipped, 2 failed\n" in again.out
    done = (folder.path / "finished.txt").read_text().split()
    assert sorted(done) == ["ALE-BB__fake_training__2", "A__fake_training__2"]  # once each
    whole = record(folder, "A__fake_training__2")
    assert (whole["state"], whole["exit_code"], whole["attempts"]) == ("finished", 0, 1)
    assert whole["command"].endswith(
        "--fail-seed 3 --env-id A --seed 2 --exp-name fake_training --run-name A__fake_training__2 --resume"
    )
    assert record(folder, "A__fake_training__3")["attempts"] == 2
    assert steps(log(folder, "ALE-BB__fake_training__2")) == [50 * i for i in range(1, 21)]


def test_failures_of_any_command(folder):
    done = folder.run(argv("false", "--env-ids", "A", "--num-seeds", 1), code=1, PYTHONPATH=str(ROOT))
    assert "failed: false --env-id A --seed 1\n" in done.stdout and "1 runs: 1 failed\n" in done.stdout


@pytest.mark.parametrize("signal_, code", [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_stopped_and_continued(folder, signal_, code):
    """Also a tool that is killed leaves nobody, and its runs go on from their checkpoints."""
    line = argv(f"{FAKE} --hang-seed 1", "--env-ids", "A", "BB", "CCC", "--num-seeds", 1, "--workers", 2)
    names = [f"{game}__fake_training__1" for game in ("A", "BB", "CCC")]
    job = folder.start(line, PYTHONPATH=str(ROOT))
    try:
        ready = [folder.path / "runs" / name / "run.log" for name in names[:2]]
        wait_until(
            lambda: all(file.exists() and "step 500/" in file.read_text() for file in ready), PATIENCE, "two runs"
        )
        family = children(job.pid)
        assert len(family) == 2
        job.send_signal(signal_)
        output, _ = job.communicate(timeout=60)
        assert job.returncode == code
        wait_until(lambda: not any(map(alive, family)), 30, "nobody is left")
    finally:
        kill_group(job)
    if code > 0:
        assert "3 runs: 2 interrupted, 1 waiting\nthe same command line again " in output
        assert record(folder, names[0])["state"] == "interrupted"
    assert not (folder.path / "runs" / names[2]).exists()
    (folder.path / "go").touch()
    done = folder.run(line, PYTHONPATH=str(ROOT))
    assert done.stdout == "3 runs: 3 finished\n"
    for name in names[:2]:
        assert "stopped after iteration 10\n$ " in log(folder, name) and "from iteration 10\n" in log(folder, name)
        assert steps(log(folder, name)) == [50 * i for i in range(1, 21)]
        assert record(folder, name)["attempts"] == 2 and record(folder, name)["seconds"] > 0


def test_a_second_ctrl_c_ends_at_once(folder):
    """A run that does not listen, here one that ignores SIGTERM."""
    (folder.path / "deaf.py").write_text(
        "import signal, sys, time\nif '--help' in sys.argv:\n    sys.exit()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\ntime.sleep(300)\n"
    )
    job = folder.start(argv("python deaf.py", "--env-ids", "A", "--num-seeds", 1), PYTHONPATH=str(ROOT))
    try:
        file = folder.path / "runs" / "A__deaf__1" / "run.log"
        wait_until(lambda: file.exists() and "ready" in file.read_text(), PATIENCE, "the run")
        (run,) = children(job.pid)
        job.send_signal(signal.SIGINT)
        said = iter(job.stderr.readline, "")
        assert any("stopping A__deaf__1" in line for line in said), "it has heard it: two at once may be one to it"
        time.sleep(1)
        assert job.poll() is None and alive(run)
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 130 and not alive(run)
    finally:
        kill_group(job)


def test_what_a_crash_leaves_behind_is_ended(folder, here):
    (folder.path / "crash.py").write_text(
        "import subprocess, sys\nif '--help' not in sys.argv:\n"
        "    child = subprocess.Popen(['sleep', '300'])\n    print('child', child.pid)\n    sys.exit(1)\n"
    )
    here(benchmark, 1, "python crash.py", "--env-ids", "A", "--num-seeds", 1)
    (child,) = re.findall(r"child (\d+)", log(folder, "A__crash__1"))
    wait_until(lambda: not alive(int(child)), 30, "the child is ended")


def test_two_benchmarks_share_a_grid(folder):
    line = argv(f"{FAKE} --pause 0.02", "--env-ids", "A", "BB", "--num-seeds", 2)
    jobs = [folder.start(line, PYTHONPATH=str(ROOT)) for _ in range(2)]
    outputs = [job.communicate(timeout=PATIENCE) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    done = (folder.path / "finished.txt").read_text().split()
    assert sorted(done) == sorted(f"{game}__fake_training__{seed}" for game in ("A", "BB") for seed in (1, 2))
    assert sum(int(re.search(r"(\d) finished", out)[1]) for out, _ in outputs if "finished" in out) == 4


def test_places(folder, here, monkeypatch):
    assert runs.deal([0, 1, 2, 3, 4], 2) == [(0, 1), (2, 3, 4)]
    assert runs.deal([0, 1], 3) == [(0,), (1,), (0,)] and runs.deal([], 2) == [(), ()]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    here(benchmark, 0, FAKE, "--env-ids", "A", "BB", "--num-seeds", 1, "--workers", 2)
    mine = sorted(os.sched_getaffinity(0))
    half = len(mine) // 2
    assert f"cores {mine[:half] or mine} gpus 4\n" in log(folder, "A__fake_training__1")
    assert f"cores {mine[half:]} gpus 5,6\n" in log(folder, "BB__fake_training__1")


def test_gpus_are_counted(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'GPU 0: NVIDIA X (UUID: GPU-1)\\n  MIG 1g (UUID: MIG-2)\\nGPU 1: NVIDIA X\\n'\n")
    smi.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert runs.gpus() == ["0", "1"] and [place.gpus for place in runs.places(3)] == [("0",), ("1",), ("0",)]
    for given, names in (("0, 2", ["0", "2"]), ("3,-1,1", ["3"]), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert runs.gpus() == names
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert runs.gpus() == [] and str(runs.Place((0, 1, 4), ("7",))) == "cores 0-1,4, GPU 7"


def test_only_shown(folder, here):
    flags = ("--env-ids", "A", "ALE/B", "--num-seeds", 2, "--workers", 0, "--exp-name", "two")
    lines = here(benchmark, 0, f"{FAKE} --quality 2", *flags).out.splitlines()
    own = "--exp-name two --run-name ALE-B__two__1 --resume"
    assert lines[1] == f"{FAKE} --quality 2 --env-id ALE/B --seed 1 {own}"
    assert len(lines) == 4 + 3
    assert lines[-1].endswith(
        f"--command '{FAKE} --quality 2 --exp-name two' --env-ids A ALE/B --num-seed 2 --start-seed 1"
    )
    assert os.listdir(folder.path) == []


def test_what_is_shown_for_a_cluster_is_what_submit_exp_takes():
    args = benchmark.Args(command="", env_ids=("A",))
    line = ["torchrun", "--standalone", "--nproc-per-node", "2", "a b.py", "--track"]
    given = submit_exp.parse(submit_exp.Args, shlex.split(benchmark.submit_command(args, line))[3:])
    assert (split_command(given.command), given.num_processes) == (["python", "a b.py", "--track"], 2)
    assert benchmark.submit_command(args, ["false"]).startswith("# (submit_exp takes `python SCRIPT.py` only")


BAD = {
    "python x.py | tee log": "runs without a shell, which `|` needs",
    "python x.py && python y.py": "runs without a shell, which `&&` needs",
    "python x.py > out;": "runs without a shell, which `>` needs",
    "python x.py --gamma $GAMMA": "runs without a shell, which `$GAMMA` needs",
    "python `which x.py`": "runs without a shell, which `",
    "OMP_NUM_THREADS=1 python x.py": "set OMP_NUM_THREADS before `python -m ...`",
    "python x.py 'a": "No closing quotation",
    "": "must be a command line",
    "no-such-program x.py": "there is no program no-such-program",
    "python x.py": "there is no file x.py in ",
    "true --seed=3": "must be without --seed, which each run gets from here",
    "true --env_id Pong": "must be without --env-id",
    "true --resume": "must be without --resume",
}


@pytest.mark.parametrize("command, says", BAD.items())
def test_bad_commands(command, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert runs.tool(benchmark.main, benchmark.Args, ["--command", command, "--env-ids", "A"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: --command") and err.count("\n") == 1 and says in err
    assert os.listdir(tmp_path) == []


def test_bad_flags(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for flags, says in {
        "--env-ids A A": "--env-ids A A: has a game twice",
        "--env-ids": "--env-ids",
        "": "--env-ids",
        "--env-ids A --num-seeds 0": "--num-seeds 0: must be above 0",
        "--env-ids A --exp-name ../x": "--exp-name '../x': must be letters",
        "--env-ids A --workers -1": "--workers -1: must be 0 or above",
    }.items():
        assert runs.tool(benchmark.main, benchmark.Args, ["--command", "true", *flags.split()]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and says in err, err
    assert os.listdir(tmp_path) == []


def test_another_command_needs_another_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.makedirs("runs/A__true__1")
    left = {"command": "true --env-id A --seed 1 --gamma 0.9", "state": "finished", "exit_code": 0}
    Path("runs/A__true__1/attempts.json").write_text(json.dumps(left))
    assert runs.tool(benchmark.main, benchmark.Args, ["--command", "true", "--env-ids", "A"]) == 2
    says = f"runs/A__true__1 was begun by another command, `{left['command']}`; give these runs another --exp-name"
    assert says in capsys.readouterr().err
    run = runs.Run("A__true__1", ["true", "--env-id", "A", "--seed", "1"])
    for content in (json.dumps({**left, "exit_code": 2}), "{", "[]", ""):  # refused by the script; damaged
        Path("runs/A__true__1/attempts.json").write_text(content)
        assert run.others is None and not run.finished


def test_commands_of_other_kinds():
    launched = [sys.executable, "-m", "cleanrl_utils.launch", "--nproc_per_node=2", "x.py"]
    assert runs.program(["torchrun", "--nproc_per_node=2", "x.py"]) == launched
    assert runs.program(["torchrun", "-m", "package"]) == ["torchrun", "-m", "package"]
    assert runs.program(["python", "x.py"]) == [sys.executable, "x.py"]
    assert runs.own_flags({"--exp-name"}, "A", 1, "e", "r") == ["--env-id", "A", "--seed", "1", "--exp-name", "e"]
    assert "--resume" not in runs.own_flags({"--resume"}, "A", 1, "e", "r")
    assert runs.experiment(["python", "-m", "package.train", "--y"]) == "train"
    assert runs.experiment(["torchrun", "--standalone", "dir/x.py", "--y"]) == "x"


def test_events_of_scripts_that_name_their_runs(tmp_path, monkeypatch):
    """CleanRL's scripts have no --run-name; their folder ends in the time."""
    monkeypatch.chdir(tmp_path)
    run = runs.Run("mine", ["true", "--env-id", "ALE/Pong-v5", "--seed", "1", "--exp-name", "e"])
    assert run.events() is None
    for at in (1, 2):
        os.makedirs(f"runs/ALE-Pong-v5__e__1__{at}")
        os.utime(f"runs/ALE-Pong-v5__e__1__{at}", (at, at))
    os.makedirs("runs/ALE-Pong-v5__e__12__3")
    assert run.events() == "runs/ALE-Pong-v5__e__1__2"


def test_the_table(tmp_path, monkeypatch):
    from rich.console import Console

    monkeypatch.chdir(tmp_path)
    names = ("Pong__ppo__1", "Pong__ppo__2", "Pong__ppo__3")
    running, waiting, failed = (runs.Run(name, ["true"]) for name in names)
    os.makedirs(running.folder)
    Path(running.log).write_text("step 16384/65536  SPS 350  left 0:02:20  mean return -20.1\nother\n")
    running.state, failed.state, running.place = "running", "failed", runs.places(1)[0]
    running._began, running._ended = 1.0, 61.0
    assert running.progress == runs.Progress(16384, 65536, 350, 140.0, -20.1)
    assert runs.progress("step 1/2  SPS 3  left 0:00:01  mean return -").mean_return is None
    assert runs.progress("step 1/2  SPS 3  left 0:00:01  mean return n/a") is runs.progress("") is None
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(benchmark.Table(2).table([running, waiting, failed], 40))
    text = console.export_text()
    assert re.search(r"Pong__ppo__1 .*running .*25 % of 65,536 .*350 .*-20.1 .*0:01:00 .*0:02:20", text), text
    assert re.search(r"Pong__ppo__2 .*waiting", text) and re.search(r"Pong__ppo__3 .*failed", text)
    # 140 s here and 200 s of the one that waits, by 2 workers
    assert "3 runs: 1 running, 1 waiting, 1 failed; time left 0:02:50" in text
    console.print(benchmark.Table(2).table([running, waiting, failed], 7))
    assert "Pong__ppo__2" not in console.export_text()


def test_a_real_script(folder):
    flags = "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 --total-timesteps 64 --num-threads 1"
    line = argv(f"python {ROOT / 'ppo_atari.py'} {flags}", "--env-ids", "PongNoFrameskip-v4", "--num-seeds", 1)
    done = folder.run(line, PYTHONPATH=str(ROOT))
    name = "PongNoFrameskip-v4__ppo_atari__1"
    assert re.search(rf"\[1/1\] finished {name}  \d:\d\d:\d\d, step 64/64, mean return -\n", done.stderr)
    assert [step for step, _ in scalars(f"{folder.path}/runs/{name}")["charts/SPS"]] == [32, 64]
    assert (folder.path / "runs" / name / "checkpoint-00000002.pt").exists()
    assert "final: global_step=64 " in log(folder, name)
