"""The README's commands, executed with short sizes, in the order of the page."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request

import pytest
from conftest import BIN, PATIENCE, ROOT, environment, free_port, kill_group

README = (ROOT / "README.md").read_text()
TOOL = re.compile(r"cleanrl_utils\.(?!launch)(\w+)")
SHORT = {"--total-timesteps": 128, "--num-envs": 2, "--num-steps": 16}


def commands():
    """The command lines of the page's bash blocks, continued lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def shortened(line):
    """The same command with short sizes, two processes at most, and this host for HOST0."""
    if "ppo_atari" in line:
        for flag in SHORT:
            line = re.sub(rf" {flag} \S+", "", line)
        line += "".join(f" {flag} {value}" for flag, value in SHORT.items())
    line = line.replace("--nnodes=1:2", "--nnodes=1")
    line = re.sub(r"--nproc_per_node=\d+", "--nproc_per_node=1" if "--nnodes=2" in line else "--nproc_per_node=2", line)
    return line.replace("HOST0", "127.0.0.1")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project's files, where the commands run; its .venv is the one that runs the tests."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("ppo_atari.py", "ppo_atari_multigpu.py", "Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, copy / name)  # with its time, so that make sees nothing to install
    if (ROOT / ".venv").exists():
        (copy / ".venv").symlink_to(ROOT / ".venv")
    return copy


def start(line, project):
    env = environment(PATH=f"{BIN}:{os.environ['PATH']}", WANDB_MODE="offline")
    return subprocess.Popen(
        line, shell=True, cwd=project, env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_training_commands(project):
    lines = [line for line in commands() if "ppo_atari" in line and not TOOL.search(line)]
    assert len(lines) >= 5
    port, jobs = str(free_port()), []
    for line in lines:
        several_machines = "--nnodes=2" in line  # these two lines are one job, and run at once
        jobs.append(start(shortened(line).replace("29400", port), project))
        if not several_machines or "--node_rank=1" in line:
            outputs = [job.communicate(timeout=PATIENCE)[0] for job in jobs]
            assert all(job.returncode == 0 for job in jobs), f"{line}\n{outputs}"
            assert sum(output.count("final: global_step=128 ") for output in outputs) == 1, outputs
            jobs = []
    assert jobs == []


def test_tools(project):
    """One run, game, and trial of each."""
    lines = [line for line in commands() if TOOL.search(line)]
    sizes = {"--total-timesteps": 128, "--num-seeds": 1, "--games": 1, "--num-trials": 1, "--workers": 1}
    made = {
        "benchmark": "runs/PongNoFrameskip-v4__ppo_atari__1/attempts.json",
        "evaluate": "runs/PongNoFrameskip-v4__ppo_atari__1/evaluation.json",
        "report": "report/index.html",
        "tune": "runs/*/trials.csv",
        "export": "exports/PongNoFrameskip-v4__ppo_atari__1/model.safetensors",
        "submit_exp": None,
    }
    for line in lines:
        for flag, value in sizes.items():
            line = re.sub(rf"{flag} \d+", f"{flag} {value}", line)
        timesteps = 1280 if "tune" in line else 128  # it needs a finished game
        line = line.replace("--total-timesteps 128", f"--total-timesteps {timesteps} --num-envs 4 --num-steps 32")
        line = line.replace("PongNoFrameskip-v4 BreakoutNoFrameskip-v4", "PongNoFrameskip-v4")
        job = start(line, project)
        output, _ = job.communicate(timeout=PATIENCE)
        assert job.returncode == 0, f"{line}\n{output}"
        file = made.pop(TOOL.search(line)[1])
        assert file is None or list(project.glob(file)), f"{line}\n{output}"
    assert made == {} and "3 job(s) are valid" in output


def test_make_train(project):
    assert "make train" in commands() and "make test" in commands()
    if not (project / ".venv" / ".installed").exists():
        pytest.skip("these tests run outside of `make test`")
    options = "".join(f" {flag} {value}" for flag, value in SHORT.items())
    job = start(f'make train ARGS="{options}"', project)
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0 and "final: global_step=128 " in output, output


def test_tensorboard(project):
    (line,) = [line for line in commands() if line.startswith("tensorboard")]
    if not list(project.glob("runs/*__ppo_atari*")):  # made by the tests above, unless this one runs alone
        start(shortened("python ppo_atari.py"), project).communicate(timeout=PATIENCE)
    server = start(f"{line} --port 0", project)
    try:
        for output in server.stdout:
            if match := re.search(r"http://localhost:\d+/", output):
                break
        runs = []
        while not runs:  # the test's time limit ends it
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                runs = json.load(urllib.request.urlopen(f"{match[0]}data/runs", timeout=30))
        assert any("__ppo_atari" in run for run in runs)
    finally:
        kill_group(server)


def test_no_other_commands():
    """A command of a new kind needs a test here."""
    known = (
        "make train",
        "make test",
        "tensorboard ",
        "python ppo_atari",
        "python -m cleanrl_utils.",
        "torchrun ",
    )
    assert [line for line in commands() if not line.startswith(known)] == []
    assert "--env-id BreakoutNoFrameskip-v4 --num-envs 16 --total-timesteps 10000000" in " ".join(README.split())
