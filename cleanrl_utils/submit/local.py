"""Plain processes on this machine. They outlive the client; their output and exit code are files."""

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from cleanrl_utils import runs
from cleanrl_utils.config import Fault, require
from cleanrl_utils.runs import Place
from cleanrl_utils.submit.spec import KEY, JobSpec, Status, read_exit

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
        require(spec.memory is None, "--num-memory", spec.memory, "limits nothing without a container")
        own = "CUDA_VISIBLE_DEVICES" not in spec.env or spec.num_gpu == 0
        require(own, "--env", "CUDA_VISIBLE_DEVICES", "is given by --num-gpu; set it before `python -m ...`")
    if spec.secret is not None:
        require(spec.secret == "env", "--wandb-secret", "", f"must be `env` here, for {KEY} of the environment")
        require(KEY in os.environ, "--wandb-secret", "env", f"needs {KEY} in the environment")


def places(jobs: int, num_gpu: int, num_vcpu: int | None) -> list[Place]:
    """Of jobs that run here at once: to each `num_vcpu` cores or its share of them, and `num_gpu` GPUs of its own.

    A job alone may use all cores, without being told which.
    """
    shares = runs.deal(runs.cores(), jobs) if jobs > 1 or num_vcpu else [()]
    fewest = min(map(len, shares))
    rule = f"this machine has {len(runs.cores())} core(s) for {jobs} job(s) at once"
    require(num_vcpu is None or not fewest or num_vcpu <= fewest, "--num-vcpu", num_vcpu, rule)
    gpus = runs.gpus() if num_gpu else []
    gpus += [str(i) for i in range(len(gpus), jobs * num_gpu)]  # more than there are: `reach` says so
    return [Place(cores[:num_vcpu], tuple(gpus[i * num_gpu : (i + 1) * num_gpu])) for i, cores in enumerate(shares)]


def reach(specs: Sequence[JobSpec]) -> None:
    """Fault where this machine has fewer GPUs than the jobs, which all start at once, take."""
    wanted = sum(spec.num_gpu for spec in specs)
    found = len(runs.gpus()) if wanted else 0
    if wanted > found:
        rule = "send fewer jobs at once, or let benchmark take turns"
        raise Fault(f"{len(specs)} job(s) take {wanted} GPU(s), this machine has {found}; {rule}")


def render(spec: JobSpec) -> dict[str, Any]:
    """The command, its place, and what is added to the environment."""
    env = dict(spec.env)
    if spec.num_gpu:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.place.gpus)
    return {"argv": list(spec.argv), "env": env, "log": spec.logs, "place": spec.place}


def show(document: dict[str, Any]) -> str:
    words = [*(f"{name}={value}" for name, value in document["env"].items()), *document["argv"]]
    return f"{shlex.join(words)} > {document['log']} 2>&1 &  # {document['place']}"


def send(spec: JobSpec, document: dict[str, Any]) -> dict[str, Any]:
    path, cores = document["log"], document["place"].cores
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
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
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
    return runs.tail(handle["log"])


def cancel(handle: dict[str, Any]) -> None:
    """SIGTERM to the job, which ends its iteration and writes a checkpoint."""
    if started(handle["pid"]) == handle["started"]:
        os.killpg(handle["pid"], signal.SIGTERM)
