"""Plain processes on this machine. They outlive the client; their output and exit code are files."""

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from cleanrl_utils.config import Fault, require
from cleanrl_utils.submit.spec import KEY, JobSpec, Status, call, read_exit, tail

# The shell is there for the exit code. A trap with a command is not inherited, so the job itself hears the signal.
SHELL = 'trap : TERM INT; "$@"; echo $? > "$0"'


def check(spec: JobSpec) -> None:
    require(spec.num_nodes == 1, "--num-nodes", spec.num_nodes, f"must be 1 with --provider {spec.options['provider']}")
    for flag, value, default in (
        ("--num-retries", spec.attempts, 1),
        ("--num-hours", spec.time_limit, None),
        ("--spot", spec.spot, False),
        ("--job-queue", spec.queue, None),
    ):
        require(value == default, flag, value, "has no effect on this machine: leave it out")
    if spec.image is None:
        require(
            spec.num_vcpu is None,
            "--num-vcpu",
            spec.num_vcpu,
            "limits nothing without a container; add --num-threads to the command",
        )
        require(spec.memory is None, "--num-memory", spec.memory, "limits nothing without a container")
    if spec.secret is not None:
        require(spec.secret == "env", "--wandb-secret", "", f"must be `env` here, for {KEY} of the environment")
        require(KEY in os.environ, "--wandb-secret", "env", f"needs {KEY} in the environment")


def reach(specs: Sequence[JobSpec]) -> None:
    """Fault where this machine has fewer GPUs than the jobs, which all start at once, take."""
    wanted = max(spec.first_gpu + spec.num_gpu for spec in specs)
    if wanted:
        listed = [line for line in call(["nvidia-smi", "-L"]).splitlines() if line.startswith("GPU ")]
        found = len(visible() or listed)
        rule = "; send fewer jobs at once, or let benchmark take turns"
        if wanted > found:
            raise Fault(f"{len(specs)} job(s) take {wanted} GPU(s), this machine has {found}{rule}")


def visible() -> list[str]:
    """The GPUs to which the user has limited this process; empty: all."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return names.split(",") if names else []


def gpus(spec: JobSpec) -> list[str]:
    """The job's own GPUs, of those that the client may use."""
    last = spec.first_gpu + spec.num_gpu
    return (visible() or [str(i) for i in range(last)])[spec.first_gpu : last]


def render(spec: JobSpec) -> dict[str, Any]:
    """The command and what is added to the environment."""
    env = dict(spec.env)
    if spec.num_gpu:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus(spec))
    return {"argv": list(spec.argv), "env": env, "log": spec.logs}


def show(document: dict[str, Any]) -> str:
    words = [*(f"{name}={value}" for name, value in document["env"].items()), *document["argv"]]
    return f"{shlex.join(words)} > {document['log']} 2>&1 &"


def send(spec: JobSpec, document: dict[str, Any]) -> dict[str, Any]:
    path = document["log"]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{path}.exit")  # of an earlier attempt
    with open(path, "ab") as log:
        process = subprocess.Popen(
            ["sh", "-c", SHELL, f"{path}.exit", *document["argv"]],
            env={**os.environ, **document["env"]},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return {"pid": process.pid, "started": started(process.pid), "log": path}


def started(pid: int) -> int | None:
    """When a living process began, in the kernel's ticks: with the pid it names one process for ever."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def statuses(handles: Sequence[dict[str, Any]]) -> list[Status]:
    return [status(handle) for handle in handles]


def status(handle: dict[str, Any]) -> Status:
    alive = started(handle["pid"]) == handle["started"]  # asked first: the code is written before the end
    code = read_exit(handle["log"])
    if code is not None:
        return Status("succeeded") if code == 0 else Status("failed", reason=f"exit code {code}")
    return Status("running") if alive else Status("failed", reason="gone without an exit code")


def log(handle: dict[str, Any]) -> str:
    return tail(handle["log"])


def cancel(handle: dict[str, Any]) -> None:
    """SIGTERM to the job, which ends its iteration and writes a checkpoint."""
    if started(handle["pid"]) == handle["started"]:
        os.killpg(handle["pid"], signal.SIGTERM)
