"""Containers on this machine: `docker run` as a process of `local`, which keeps its output and its exit code."""

import os
import re
from collections.abc import Sequence
from typing import Any

from cleanrl_utils.config import Fault, require
from cleanrl_utils.submit import local
from cleanrl_utils.submit.local import log, show, statuses
from cleanrl_utils.submit.spec import KEY, WORKDIR, JobSpec, call, outlives, short_name

__all__ = ["cancel", "check", "log", "reach", "render", "send", "show", "statuses"]


def check(spec: JobSpec) -> None:
    local.check(spec)
    require(spec.image is not None, "--docker-tag", "", "is needed: the image to run")
    folder = spec.checkpoint_dir or ""
    rule = "must be a folder, which is mounted, or a URL of a store: this one would end with the container"
    require("://" not in folder or outlives(folder), "--checkpoint-dir", folder, rule)


def reach(specs: Sequence[JobSpec]) -> None:
    call(["docker", "version"])
    local.reach(specs)


def render(spec: JobSpec) -> dict[str, Any]:
    """`docker run` with the checkpoints' folder mounted and the key taken, by its name, from the client's environment.

    The files belong to the user who submits. `docker run` hands its SIGTERM on to the job.
    """
    folder = spec.checkpoint_dir
    runs = os.path.abspath("runs" if folder is None or "://" in folder else folder)
    require(":" not in runs, "--checkpoint-dir", runs, "must be without a colon, at which docker cuts it")
    words = ["docker", "run", "--rm", "--name", short_name(spec.name, 63)]
    words += ["--shm-size", f"{spec.shm_size}m"]
    if spec.place.cores:  # not a quota: the scripts would not see it, and start a thread for each core of the machine
        words += ["--cpuset-cpus", ",".join(map(str, spec.place.cores))]
    elif spec.num_vcpu:
        words += ["--cpus", str(spec.num_vcpu)]
    words += ["--memory", f"{spec.memory}m"] if spec.memory else []
    words += ["--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp", "--env", "LOGNAME=trainer"]
    words += ["--volume", f"{runs}:{WORKDIR}/runs"]
    if spec.num_gpu:
        words += ["--gpus", f'"device={",".join(spec.place.gpus)}"']
    for name, value in spec.env.items():
        words += ["--env", f"{name}={value}"]
    if spec.secret is not None:
        words += ["--env", KEY]
    argv = [*words, str(spec.image), *spec.argv]
    return {"argv": argv, "env": {}, "log": spec.logs, "mounted": runs, "place": spec.place}


def send(spec: JobSpec, document: dict[str, Any]) -> dict[str, Any]:
    os.makedirs(document["mounted"], exist_ok=True)  # docker would make it as root
    return {**local.send(spec, document), "container": short_name(spec.name, 63)}


def cancel(handle: dict[str, Any]) -> None:
    """SIGTERM to the job, which ends its iteration and writes a checkpoint; a container that is gone is no error."""
    try:
        call(["docker", "kill", "--signal", "TERM", handle["container"]])
    except Fault as fault:
        if not re.search(r"no such container|no container with|not running", str(fault), re.IGNORECASE):
            raise
