"""AWS Batch, by boto3: a job definition for each content, a job for each run, multi-node parallel for several nodes.

Rules: https://docs.aws.amazon.com/batch/latest/APIReference/ (SubmitJob, RegisterJobDefinition, RetryStrategy).
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cleanrl_utils import EXIT_PREEMPTED
from cleanrl_utils.config import Fault, UsageError, require
from cleanrl_utils.submit.spec import KEY, JobSpec, Status, outlives, short_name

ARN = r"arn:aws[a-z-]*:"
QUEUED = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING")
GONE = ("INVALID", "DELETING", "DELETED")
ALL_NODES = "0:"


def check(spec: JobSpec) -> None:
    require(spec.image is not None, "--docker-tag", "", "is needed: the image to run")
    require(spec.queue is not None, "--job-queue", "", "is needed: the Batch queue")
    good = bool(re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,127}}|{ARN}batch:[\w:/-]+", str(spec.queue)))
    require(good, "--job-queue", spec.queue, "must be a queue's name or ARN")
    require(1 <= spec.num_nodes <= 1000, "--num-nodes", spec.num_nodes, "must be 1 .. 1000 on Batch")
    rule = (
        f"is not possible with --num-nodes {spec.num_nodes}: Batch runs multi-node jobs on on-demand machines only; "
        "use one node, or Kubernetes"
    )
    require(not spec.spot or spec.num_nodes == 1, "--spot", "", rule)
    limit = spec.time_limit
    require(limit is None or limit >= 60, "--num-hours", (limit or 0) / 3600, "must be 60 seconds or more on Batch")
    for name, value in spec.env.items():
        require(not name.upper().startswith("AWS_BATCH"), "--env", name, "must not start with AWS_BATCH")
        require(value != "", "--env", name, "must not be empty on Batch")
    for flag in ("execution_role_arn", "job_role_arn"):
        role = spec.options[flag]
        good = role is None or bool(re.fullmatch(rf"{ARN}iam::\d{{12}}:role/[\w+=,.@/-]+", role))
        require(good, f"--{flag.replace('_', '-')}", role, "must be the ARN of an IAM role")
    if spec.secret is not None:
        good = bool(re.fullmatch(rf"{ARN}(secretsmanager|ssm):[\w:/+=.@-]+", spec.secret))
        require(good, "--wandb-secret", "", "must be the ARN of a Secrets Manager secret or an SSM parameter")
        need = "needs --execution-role-arn, the role that reads it"
        require(spec.options["execution_role_arn"] is not None, "--wandb-secret", spec.secret, need)
    folder = spec.checkpoint_dir
    rule = "must be a URL such as s3://bucket/folder: a folder ends with the container"
    require(folder is None or outlives(folder), "--checkpoint-dir", folder, rule)
    size = len(json.dumps(render(spec)["job"]))
    require(size < 8192, "--command", f"of {size} characters", "must fit in 8192, with the environment, on Batch")


def resource_requirements(spec: JobSpec) -> list[dict[str, str]]:
    """Batch wants strings, and no entry for no GPU."""
    wanted = {"VCPU": spec.num_vcpu, "MEMORY": spec.memory, "GPU": spec.num_gpu}
    return [{"type": kind, "value": str(value)} for kind, value in wanted.items() if value]


def render(spec: JobSpec) -> dict[str, Any]:
    """Arguments of RegisterJobDefinition and of SubmitJob."""
    container: dict[str, Any] = {
        "image": spec.image,
        "resourceRequirements": resource_requirements(spec),
        "linuxParameters": {"sharedMemorySize": spec.shm_size},
    }
    for key, option in (("executionRoleArn", "execution_role_arn"), ("jobRoleArn", "job_role_arn")):
        if spec.options[option] is not None:
            container[key] = spec.options[option]
    if spec.secret is not None:
        container["secrets"] = [{"name": KEY, "valueFrom": spec.secret}]
    if spec.options["log_group"] is not None:
        options = {"awslogs-group": spec.options["log_group"], "awslogs-stream-prefix": "cleanrl"}
        if spec.options["region"] is not None:
            options["awslogs-region"] = spec.options["region"]
        container["logConfiguration"] = {"logDriver": "awslogs", "options": options}
    definition: dict[str, Any] = {"platformCapabilities": ["EC2"]}
    override = {"command": list(spec.argv), "environment": [{"name": k, "value": v} for k, v in spec.env.items()]}
    job: dict[str, Any] = {"jobName": short_name(spec.name, 128), "jobQueue": spec.queue}
    if spec.num_nodes == 1:
        definition |= {"type": "container", "containerProperties": container}
        job["containerOverrides"] = override
    else:
        nodes = {"targetNodes": ALL_NODES, "container": container}
        # mainNode 0: its end is the job's, and as rank 0 it writes all that there is
        shape = {"mainNode": 0, "numNodes": spec.num_nodes, "nodeRangeProperties": [nodes]}
        definition |= {"type": "multinode", "nodeProperties": shape}
        override = {"targetNodes": ALL_NODES, "containerOverrides": override}
        job["nodeOverrides"] = {"nodePropertyOverrides": [override]}
    digest = hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:12]
    image = short_name(str(spec.image).split("@")[0], 100)
    definition["jobDefinitionName"] = job["jobDefinition"] = f"cleanrl-{image}-{digest}"
    job["retryStrategy"] = {
        "attempts": spec.attempts,
        "evaluateOnExit": [
            {"onStatusReason": "Host EC2*", "action": "RETRY"},  # the machine was reclaimed or failed
            {"onExitCode": str(EXIT_PREEMPTED), "action": "RETRY"},
            {"onReason": "*", "action": "EXIT"},  # else the default, a retry, would run a fault again
        ],
    }
    if spec.time_limit is not None:
        job["timeout"] = {"attemptDurationSeconds": spec.time_limit}
    return {"region": spec.options["region"], "definition": definition, "job": job}


def show(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2)


@contextmanager
def client(service: str, region: str | None) -> Iterator[Any]:
    """A boto3 client, whose errors are one line."""
    try:
        import boto3
        import botocore.exceptions as errors
    except ImportError:
        raise UsageError("--provider aws: needs boto3: pip install 'cleanrl-distributed[cloud]'") from None
    try:
        yield boto3.client(service, region_name=region)
    except (errors.BotoCoreError, errors.ClientError) as error:
        raise Fault(f"AWS {service}: {' '.join(str(error).split())}") from None


def reach(specs: Sequence[JobSpec]) -> None:
    """Fault where the queue cannot run these jobs: Batch takes such jobs, and they wait for ever."""
    spec = specs[0]
    with client("batch", spec.options["region"]) as batch:
        queues = batch.describe_job_queues(jobQueues=[spec.queue])["jobQueues"]
        if not queues:
            raise Fault(f"--job-queue {spec.queue}: there is no such queue in {batch.meta.region_name}")
        if queues[0]["state"] != "ENABLED":
            raise Fault(f"--job-queue {spec.queue}: the queue is {queues[0]['state']}")
        if queues[0].get("status") in GONE:
            raise Fault(f"--job-queue {spec.queue}: the queue is {queues[0]['status']}")
        names = [entry["computeEnvironment"] for entry in queues[0]["computeEnvironmentOrder"]]
        found = batch.describe_compute_environments(computeEnvironments=names)["computeEnvironments"]
    ready = [each for each in found if each.get("state") != "DISABLED" and each.get("status") not in GONE]
    if not ready:
        raise Fault(
            f"--job-queue {spec.queue}: its compute environments are disabled or invalid: no machine would start"
        )
    types = {each.get("computeResources", {}).get("type", "unmanaged") for each in ready}
    if spec.spot and types != {"SPOT"}:
        raise Fault(f"--spot: the machines of --job-queue {spec.queue} are {', '.join(sorted(types))}, not SPOT")
    if any(kind.startswith("FARGATE") for kind in types):
        raise Fault(f"--job-queue {spec.queue}: its machines are {', '.join(sorted(types))}; a job needs EC2 or SPOT")
    if spec.num_nodes > 1 and types != {"EC2"}:
        kinds = ", ".join(sorted(types))
        raise Fault(f"--num-nodes {spec.num_nodes}: needs on-demand machines; those of {spec.queue} are {kinds}")


def send(spec: JobSpec, document: dict[str, Any]) -> dict[str, Any]:
    """Submit the job, with a definition of this content that is there already or is registered now."""
    definition, region = document["definition"], document["region"]
    with client("batch", region) as batch:
        name = definition["jobDefinitionName"]
        active = batch.describe_job_definitions(jobDefinitionName=name, status="ACTIVE")["jobDefinitions"]
        arn = active[0]["jobDefinitionArn"] if active else None
        if arn is None:
            arn = batch.register_job_definition(**definition)["jobDefinitionArn"]
        region = batch.meta.region_name
        try:
            job = batch.submit_job(**{**document["job"], "jobDefinition": arn})
        except Exception:
            if not active:  # nothing uses it
                batch.deregister_job_definition(jobDefinition=arn)
            raise
    handle = {"job_id": job["jobId"], "job_definition": arn, "region": region, "num_nodes": spec.num_nodes}
    return {**handle, "log_group": spec.options["log_group"] or "/aws/batch/job"}


def describe(handle: dict[str, Any], ids: Sequence[str]) -> list[dict[str, Any]]:
    with client("batch", handle["region"]) as batch:
        parts = [ids[i : i + 100] for i in range(0, len(ids), 100)]
        return [job for part in parts for job in batch.describe_jobs(jobs=part)["jobs"]]


def statuses(handles: Sequence[dict[str, Any]]) -> list[Status]:
    found = {job["jobId"]: job for job in describe(handles[0], [handle["job_id"] for handle in handles])}
    return [status(found.get(handle["job_id"])) for handle in handles]


def status(job: dict[str, Any] | None) -> Status:
    if job is None:
        return Status("unknown", reason="Batch has forgotten it, a week after its end")
    ended = job["status"] in ("SUCCEEDED", "FAILED")
    attempt = max(1, len(job.get("attempts", [])) + (not ended))
    if job["status"] in QUEUED:
        return Status("queued", attempt, job["status"].lower())
    container = job.get("container") or (job.get("attempts") or [{}])[-1].get("container", {})
    code = container.get("exitCode")
    reasons = [f"exit code {code}" * (code is not None), container.get("reason", ""), job.get("statusReason", "")]
    state = {"RUNNING": "running", "SUCCEEDED": "succeeded", "FAILED": "failed"}[job["status"]]
    return Status(state, attempt, "; ".join(filter(None, reasons)) if state == "failed" else "")  # type: ignore[arg-type]


def log(handle: dict[str, Any]) -> str:
    """The newest lines of CloudWatch, of the main node."""
    main = handle["job_id"] + "#0" * (handle["num_nodes"] > 1)
    job = next(iter(describe(handle, [main])), {})
    stream = job.get("container", {}).get("logStreamName")
    if stream is None:
        return ""
    with client("logs", handle["region"]) as logs:
        where = {"logGroupName": handle["log_group"], "logStreamName": stream}
        events = logs.get_log_events(**where, limit=200, startFromHead=False)["events"]
    return "\n".join(event["message"] for event in events)


def cancel(handle: dict[str, Any]) -> None:
    """Batch cancels what waits and stops what runs; a job that has ended is no error to it."""
    with client("batch", handle["region"]) as batch:
        batch.terminate_job(jobId=handle["job_id"], reason="cancelled with submit_exp")
