"""SLURM: one sbatch script a job. The working folder is on a disk that the nodes see, as on most clusters."""

import os
import shlex
import stat
from collections.abc import Sequence
from typing import Any

from cleanrl_utils import EXIT_PREEMPTED
from cleanrl_utils.config import Fault, require
from cleanrl_utils.runs import tail
from cleanrl_utils.submit.spec import KEY, SECRET_NAME, JobSpec, Status, call, read_exit, short_name

WARNING = 300  # seconds before the time limit: an iteration has to end in them
OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING")


def check(spec: JobSpec) -> None:
    require(spec.image is None, "--docker-tag", spec.image, "does not apply: SLURM runs the python that submits")
    rule = "does not apply to SLURM: name a preemptible partition as --job-queue"
    require(not spec.spot, "--spot", "", rule)
    queue = spec.queue or "one"
    require(len(queue.split()) == 1, "--job-queue", queue, "must be a partition, or several such as a,b")
    limit = spec.time_limit
    require(limit is None or limit >= 60, "--num-hours", (limit or 0) / 3600, "must be 60 seconds or more")
    for name, value in spec.env.items():
        require("\n" not in value, "--env", name, "must be one line")
    if spec.secret is not None:
        path = spec.secret
        good = os.path.isabs(path) and os.path.isfile(path)
        require(
            good, "--wandb-secret", "", "must be the absolute path of a file with the key, on a disk that nodes see"
        )
        private = not os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        require(private, "--wandb-secret", path, "can be read by others: chmod 600 it")


def reach(specs: Sequence[JobSpec]) -> None:
    """Fault where there is no controller, or no such partition."""
    partitions = call(["sinfo", "--noheader", "--format=%R"]).split()
    queue = specs[0].queue  # or several, of which the first that is free takes the job
    if queue is not None and not {*queue.split(",")} <= {*partitions}:
        raise Fault(f"--job-queue {queue}: no such partition; there are {', '.join(sorted(set(partitions)))}")


def render(spec: JobSpec) -> str:
    """The script. It is told of the time limit before, and starts itself again where the job ended as preempted."""
    warning, options = WARNING, []
    if spec.queue is not None:
        options.append(f"--partition={spec.queue}")
    if spec.time_limit is not None:
        warning = min(WARNING, spec.time_limit // 2)
        minutes, seconds = divmod(spec.time_limit, 60)
        options.append(f"--time={minutes}:{seconds:02}")
    if spec.num_gpu:
        options.append(f"--gres=gpu:{spec.num_gpu}")
    options += [
        f"--job-name={short_name(spec.name, 128)}",
        f"--nodes={spec.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={spec.num_vcpu}",
        f"--mem={spec.memory}M",
        f"--signal=B:USR1@{warning}",
        "--requeue" if spec.attempts > 1 else "--no-requeue",
        "--open-mode=append",
        f"--chdir={os.getcwd()}",
        f"--output={spec.logs.replace('%', '%%')}",
    ]
    head = "".join(f"#SBATCH {shlex.quote(option)}\n" for option in options)
    env = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in spec.env.items())
    command = list(spec.argv)
    if spec.secret is not None:  # read by each task: the batch script and what srun sends do not hold it
        command = ["sh", "-c", f'{KEY}=$(cat "$0") && export {KEY} && exec "$@"', spec.secret, *command]
    srun = ["srun", f"--cpus-per-task={spec.num_vcpu}", "--kill-on-bad-exit=0", "--wait=600", *command]
    exit_file = shlex.quote(f"{spec.logs}.exit")
    return f"""\
#!/bin/bash
{head}{env}rm -f {exit_file}
{shlex.join(srun)} &
job=$!
trap 'kill -USR1 "$job" 2>/dev/null' USR1
trap : TERM  # SLURM sends it to the tasks itself, and one more makes srun kill them
while kill -0 "$job" 2>/dev/null; do wait "$job"; done  # a trap ends a wait
wait "$job"
code=$?
# Preempted, and nobody else is ending or requeuing the job: SLURM's own requeue changes the state first.
if [ "$code" = {EXIT_PREEMPTED} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {spec.attempts - 1} ] &&
  [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
echo "$code" > {exit_file}
exit "$code"
"""


def show(document: str) -> str:
    return document


def send(spec: JobSpec, document: str) -> dict[str, Any]:
    os.makedirs(os.path.dirname(spec.logs), exist_ok=True)
    # sbatch hands the environment to the controller, which stores it. In a job of SLURM, it holds that job's sizes.
    env = {name: value for name, value in os.environ.items() if SECRET_NAME.search(name) is None}
    env = {name: value for name, value in env.items() if not name.startswith("SLURM_") or name in OF_THE_CLUSTER}
    lines = [line for line in document.splitlines() if line.startswith("#SBATCH ")]
    options = [word for line in lines for word in shlex.split(line)[1:]]  # in a script, SBATCH_* would overrule them
    answer = call(["sbatch", "--parsable", *options], stdin=document, env=env)
    return {"job_id": answer.strip().partition(";")[0], "log": spec.logs}


def statuses(handles: Sequence[dict[str, Any]]) -> list[Status]:
    ids = ",".join(handle["job_id"] for handle in handles)
    # --me keeps an id that the controller has forgotten from being an error
    words = ["squeue", "--me", "--noheader", f"--jobs={ids}", "--states=all"]
    lines = call([*words, "--Format=JobID:|,State:|,RestartCnt:|,Reason:|"]).splitlines()
    found = {line.split("|")[0]: line.split("|")[1:4] for line in lines}
    return [status(handle, *found.get(handle["job_id"], ["", "0", ""])) for handle in handles]


def status(handle: dict[str, Any], state: str, restarts: str, reason: str) -> Status:
    attempt = int(restarts) + 1
    if state in QUEUED:
        return Status("queued", attempt, reason)
    if state in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"):
        return Status("running", attempt, state.lower())
    if state.startswith("CANCELLED"):
        return Status("cancelled", attempt)
    code = read_exit(handle["log"])
    if code is not None:
        return Status("succeeded", attempt) if code == 0 else Status("failed", attempt, f"exit code {code}")
    return Status("failed" if state else "unknown", attempt, state.lower() or "SLURM has forgotten it, without a code")


def log(handle: dict[str, Any]) -> str:
    return tail(handle["log"])


def cancel(handle: dict[str, Any]) -> None:
    """SIGTERM, and after KillWait SIGKILL; a job that has ended is no error to scancel."""
    call(["scancel", handle["job_id"]])
