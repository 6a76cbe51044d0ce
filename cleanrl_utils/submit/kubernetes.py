"""Kubernetes: an Indexed Job with a headless Service, a JobSet or a Kubeflow TrainJob, sent by kubectl."""

import importlib.util
import json
import re
from collections.abc import Sequence
from typing import Any

from cleanrl_utils import EXIT_PREEMPTED
from cleanrl_utils.config import Fault, UsageError, require
from cleanrl_utils.launch import PORT
from cleanrl_utils.submit.spec import GRACE, KEY, WORKDIR, JobSpec, Status, call, outlives, short_name

KINDS = {"job": "job.batch", "jobset": "jobset.jobset.x-k8s.io", "trainjob": "trainjob.trainer.kubeflow.org"}
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
VOLUME = "pvc:"
EXIT_USAGE = 2
KEEP = 7 * 24 * 3600  # seconds for which the cluster keeps an ended job and its log


def check(spec: JobSpec) -> None:
    """The names are made to fit (`object_name`), so these are the rules for what the user gives."""
    if importlib.util.find_spec("yaml") is None:
        raise UsageError("--provider kubernetes: needs PyYAML: pip install 'cleanrl-distributed[cloud]'")
    kind = spec.options["kubernetes_kind"]
    require(spec.image is not None, "--docker-tag", "", "is needed: the image to run")
    require(spec.num_nodes <= 1000, "--num-nodes", spec.num_nodes, "must be 1 .. 1000 on Kubernetes")  # as in the names
    limit = spec.time_limit
    require(limit is None or limit >= 1, "--num-hours", (limit or 0) / 3600, "must be 1 second or more")
    if kind == "trainjob":
        rule = "must be 1 with --kubernetes-kind trainjob, whose runtime decides about restarts; use jobset"
        require(spec.attempts == 1, "--num-retries", spec.attempts, rule)
    if spec.secret is not None:
        good = bool(re.fullmatch(rf"{LABEL}(\.{LABEL})*/[-._a-zA-Z0-9]+", spec.secret))
        require(good, "--wandb-secret", "", "must be NAME/KEY of a Kubernetes Secret, such as wandb/api-key")
    if spec.checkpoint_dir is not None:
        claim = re.fullmatch(rf"{VOLUME}{LABEL}", spec.checkpoint_dir)
        rule = "must be a URL such as s3://bucket/folder, or pvc:CLAIM for a PersistentVolumeClaim"
        require(bool(claim) or outlives(spec.checkpoint_dir), "--checkpoint-dir", spec.checkpoint_dir, rule)
    for name in ("namespace", "service_account"):
        value = spec.options[name]
        good = value is None or is_label(value)
        require(good, f"--{name.replace('_', '-')}", value, "must be a lower-case DNS label of 63 characters")
    if spec.queue is not None:
        require(is_label(spec.queue), "--job-queue", spec.queue, "must be the name of a Kueue LocalQueue")
    for word in spec.options["node_selector"]:
        shape = r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9][-\w.]{0,62}=([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?"
        require(bool(re.fullmatch(shape, word)), "--node-selector", word, "must be LABEL=VALUE")
    labels = [word.partition("=")[0] for word in spec.options["node_selector"]]
    require(len(set(labels)) == len(labels), "--node-selector", " ".join(labels), "names a label twice")
    if spec.spot:
        rule = "needs --node-selector, which names your Spot nodes, such as cloud.google.com/gke-spot=true"
        require(bool(spec.options["node_selector"]), "--spot", "", rule)


def reach(specs: Sequence[JobSpec]) -> None:
    """Fault where the cluster does not answer, does not know the kind, or the user may not create it."""
    kind = KINDS[specs[0].options["kubernetes_kind"]]
    try:
        call(["kubectl", "auth", "can-i", "create", kind, *namespace(specs[0])])
    except Fault as fault:
        refused = str(fault).endswith(": no")
        raise Fault(f"kubectl: you may not create {kind} here") if refused else fault from None


def is_label(name: str) -> bool:
    return len(name) <= 63 and re.fullmatch(LABEL, name) is not None


def namespace(spec: JobSpec) -> list[str]:
    name = spec.options["namespace"]
    return [] if name is None else [f"--namespace={name}"]


def object_name(spec: JobSpec) -> str:
    """With what the controllers append, -node-0-999-xxxxx, it must be a DNS label of 63 characters."""
    name = spec.name.lower()
    return short_name(name if name[0].isalpha() else f"run-{name}", 45, "a-z0-9")


def render(spec: JobSpec) -> list[dict[str, Any]]:
    """The objects to create, in their order."""
    kind = spec.options["kubernetes_kind"]
    metadata: dict[str, Any] = {"name": object_name(spec), "labels": {"app.kubernetes.io/name": "cleanrl"}}
    metadata["labels"]["cleanrl/submission"] = short_name(spec.submission, 63)
    if spec.queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = spec.queue
    if kind == "trainjob":
        return [{**train_job(spec), "metadata": metadata}]
    if kind == "jobset":
        return [{**job_set(spec), "metadata": metadata}]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job_spec(spec)}
    if spec.num_nodes == 1:
        return [job]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": object_name(spec), "labels": metadata["labels"]},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the nodes look for each other before they are ready
            "selector": {"batch.kubernetes.io/job-name": object_name(spec)},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    return [service, job]


def job_spec(spec: JobSpec) -> dict[str, Any]:
    """An Indexed Job. Its pods end together (each loses its peers), so they are started again one by one."""
    name, jobset = object_name(spec), spec.options["kubernetes_kind"] == "jobset"
    first = f"{name}-node-0-0.{name}" if jobset else f"{name}-0.{name}"
    env = environment(spec)
    if spec.num_nodes > 1:
        env += [{"name": "PET_NNODES", "value": str(spec.num_nodes)}, {"name": "PET_MASTER_ADDR", "value": first}]
    container: dict[str, Any] = {"name": "node", "image": spec.image, "command": [*map(literal, spec.argv)], "env": env}
    container |= {"resources": resources(spec), "volumeMounts": mounts(spec)}
    pod = {**pod_spec(spec), "containers": [container], "restartPolicy": "Never"}
    if spec.num_nodes > 1 and not jobset:
        pod["subdomain"] = name
    rules: list[dict[str, Any]] = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [EXIT_USAGE]}}]
    if not jobset and spec.attempts > 1:  # of a JobSet each failure restarts all nodes, and counts
        rules.append({"action": "Ignore", "onExitCodes": {"operator": "In", "values": [EXIT_PREEMPTED]}})
        rules.append({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    result: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": spec.num_nodes,
        "parallelism": spec.num_nodes,
        "backoffLimit": 0 if jobset else (spec.attempts - 1) * spec.num_nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": {"app.kubernetes.io/name": "cleanrl"}}, "spec": pod},
    }
    if spec.time_limit is not None:
        result["activeDeadlineSeconds"] = spec.time_limit
    if not jobset:
        result["ttlSecondsAfterFinished"] = KEEP
    return result


def job_set(spec: JobSpec) -> dict[str, Any]:
    """One replicated Job; a failure of one node restarts all, except after a usage error."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": spec.attempts - 1,
                "rules": [{"name": "usage", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job_spec(spec)}}],
            "ttlSecondsAfterFinished": KEEP,
        },
    }


def train_job(spec: JobSpec) -> dict[str, Any]:
    """Kubeflow Trainer's own torch runtime, whose PET_* variables the launcher reads. Pod settings are its patches."""
    container: dict[str, Any] = {"name": "node", "volumeMounts": mounts(spec)}
    node = {"template": {"spec": {"template": {"spec": {**pod_spec(spec), "containers": [container]}}}}, "name": "node"}
    result: dict[str, Any] = {
        "runtimeRef": {
            "name": "torch-distributed",
            "kind": "ClusterTrainingRuntime",
            "apiGroup": "trainer.kubeflow.org",
        },
        "trainer": {
            "image": spec.image,
            "command": [*map(literal, spec.argv)],
            "env": environment(spec),
            "numNodes": spec.num_nodes,
            "resourcesPerNode": resources(spec),
        },
        "runtimePatches": [
            {
                "manager": "cleanrl.dev/submit-exp",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
            }
        ],
    }
    if spec.time_limit is not None:
        result["activeDeadlineSeconds"] = spec.time_limit
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": result}


def literal(text: str) -> str:
    """Kubernetes puts a variable's value in place of `$(NAME)`, and `$` in place of `$$`."""
    return text.replace("$", "$$")


def environment(spec: JobSpec) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [{"name": name, "value": literal(value)} for name, value in spec.env.items()]
    if spec.secret is not None:
        name, key = spec.secret.split("/")
        env.append({"name": KEY, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}})
    return env


def resources(spec: JobSpec) -> dict[str, Any]:
    limits: dict[str, str] = {"memory": f"{spec.memory}Mi"}
    if spec.num_gpu:
        limits["nvidia.com/gpu"] = str(spec.num_gpu)
    return {"limits": limits, "requests": {**limits, "cpu": str(spec.num_vcpu)}}


def mounts(spec: JobSpec) -> list[dict[str, Any]]:
    result = [{"name": "shm", "mountPath": "/dev/shm"}]
    if (spec.checkpoint_dir or "").startswith(VOLUME):
        result.append({"name": "runs", "mountPath": f"{WORKDIR}/runs"})
    return result


def pod_spec(spec: JobSpec) -> dict[str, Any]:
    """What a pod has beside its container."""
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{spec.shm_size}Mi"}}
    ]
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": GRACE, "volumes": volumes}
    if (spec.checkpoint_dir or "").startswith(VOLUME):
        claim = str(spec.checkpoint_dir)[len(VOLUME) :]
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
        pod["securityContext"] = {"fsGroup": 1000}  # the image's user is no root
    if spec.options["service_account"] is not None:
        pod["serviceAccountName"] = spec.options["service_account"]
    selector = dict(word.split("=") for word in spec.options["node_selector"])
    if selector:
        pod["nodeSelector"] = selector
    tolerated = [
        *selector,
        *(["nvidia.com/gpu"] if spec.num_gpu else []),
    ]  # such nodes are often tainted by these names
    if tolerated:
        pod["tolerations"] = [{"key": key, "operator": "Exists"} for key in tolerated]
    return pod


def show(documents: list[dict[str, Any]]) -> str:
    import yaml

    return yaml.safe_dump_all(documents, sort_keys=False)


def send(spec: JobSpec, documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Create the objects. One that is there already is this submission's: its name holds the submission's token."""
    for document in documents:
        try:
            call(["kubectl", "create", *namespace(spec), "-f", "-"], stdin=show([document]))
        except Fault as fault:
            if "AlreadyExists" not in str(fault) or "being deleted" in str(fault):
                raise
    return {
        "kind": spec.options["kubernetes_kind"],
        "name": object_name(spec),
        "namespace": namespace(spec),
        "service": len(documents) > 1,
    }


def statuses(handles: Sequence[dict[str, Any]]) -> list[Status]:
    kind, where = KINDS[handles[0]["kind"]], handles[0]["namespace"]
    names = [handle["name"] for handle in handles]
    # two names at least, so that a list comes back
    found = call(["kubectl", "get", kind, *where, "--ignore-not-found", "--output=json", *names, names[0]])
    items = json.loads(found)["items"] if found.strip() else []
    by_name = {item["metadata"]["name"]: item for item in items}
    return [status(by_name.get(name)) for name in names]


def status(item: dict[str, Any] | None) -> Status:
    if item is None:
        return Status("unknown", reason="not in the cluster")
    now = item.get("status", {})
    attempt = now.get("restarts", 0) + 1
    for condition in now.get("conditions", []):
        if condition["status"] == "True" and condition["type"] in ("Complete", "Completed"):
            return Status("succeeded", attempt)
        if condition["status"] == "True" and condition["type"] == "Failed":
            return Status("failed", attempt, condition.get("reason", ""))
    jobs = [now, *now.get("replicatedJobsStatus", []), *now.get("jobsStatus", [])]
    return Status("running" if any(job.get("ready") for job in jobs) else "queued", attempt)


def log(handle: dict[str, Any]) -> str:
    """Of the first node. An Indexed Job's pods carry their index as a label, in all three kinds."""
    label = {"job": "batch.kubernetes.io/job-name", "jobset": "jobset.sigs.k8s.io/jobset-name"}
    owner = label.get(handle["kind"], label["jobset"])  # a TrainJob makes a JobSet of its name
    selector = f"{owner}={handle['name']},batch.kubernetes.io/job-completion-index=0"
    return call(["kubectl", "logs", *handle["namespace"], f"--selector={selector}", "--tail=200"])


def cancel(handle: dict[str, Any]) -> None:
    """Delete the objects; the pods get SIGTERM."""
    names = [f"{KINDS[handle['kind']]}/{handle['name']}"]
    names += [f"service/{handle['name']}"] if handle["service"] else []
    call(["kubectl", "delete", *handle["namespace"], "--ignore-not-found", "--wait=false", *names])
