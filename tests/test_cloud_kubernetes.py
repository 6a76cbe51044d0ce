"""Kubernetes: real kubectl against a small API server that checks what it is sent as the real one would.

Jobs and Services are checked by kubernetes-validate in strict mode, JobSets and TrainJobs by the models of their API.
"""

import json
import os
import re
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import pytest
from conftest import BIN, ROOT, Folder

pytestmark = pytest.mark.cloud
kubernetes_validate = pytest.importorskip("kubernetes_validate")
models = pytest.importorskip("kubeflow_trainer_api.models")
if not (BIN / "kubectl").exists() and shutil.which("kubectl") is None:
    pytest.skip("needs kubectl", allow_module_level=True)

KEY = "sentinel-" + "3" * 31
RESOURCES = {  # path of the group: (kind, plural)
    "api/v1": [("Service", "services"), ("Pod", "pods"), ("Namespace", "namespaces")],
    "apis/batch/v1": [("Job", "jobs")],
    "apis/jobset.x-k8s.io/v1alpha2": [("JobSet", "jobsets")],
    "apis/trainer.kubeflow.org/v1alpha1": [("TrainJob", "trainjobs")],
    "apis/authorization.k8s.io/v1": [("SelfSubjectAccessReview", "selfsubjectaccessreviews")],
}


def fault(document):
    """What is wrong with an object, or None. Unknown fields are wrong too."""
    model = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}.get(document["kind"])
    try:
        if model is None:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
        else:
            understood = getattr(models, model).from_dict(document).to_dict()
            if understood != document:
                return "unknown field"
            for job in document["spec"].get("replicatedJobs", []):  # the models know no rules of a Job
                inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["template"]}
                return fault(inner)
    except Exception as error:
        return str(error)
    return None


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects, self.requests, self.may = {}, [], True


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, body, code=200, kind="application/json"):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, code, reason, message):
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self.answer({**status, "reason": reason, "message": message, "code": code}, code)

    def body(self):
        data = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode(errors="replace")
        self.server.requests.append((self.command, self.path, data))
        return data

    def openapi(self, group):
        """As much as tells kubectl that the server itself validates fields."""
        name, _, version = group.removeprefix("api").removeprefix("s").strip("/").rpartition("/")
        parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
        paths = {
            f"/{group}/{plural}/{{name}}": {
                "patch": {
                    "parameters": parameters,
                    "responses": {},
                    "x-kubernetes-action": "patch",
                    "x-kubernetes-group-version-kind": {"group": name, "version": version, "kind": kind},
                }
            }
            for kind, plural in RESOURCES[group]
        }
        return {"openapi": "3.0.0", "info": {"title": "x", "version": "1"}, "paths": paths}

    def do_GET(self):
        self.body()
        url = urlparse(self.path)
        path = url.path.strip("/")
        if path == "api":
            return self.answer({"kind": "APIVersions", "versions": ["v1"]})
        if path == "apis":
            groups = []
            for group in list(RESOURCES)[1:]:
                _, name, version = group.split("/")
                entry = {"groupVersion": f"{name}/{version}", "version": version}
                groups.append({"name": name, "versions": [entry], "preferredVersion": entry})
            return self.answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        if path in RESOURCES:
            verbs = ["create", "get", "list", "delete", "patch"]
            found = [
                {"name": plural, "singularName": kind.lower(), "namespaced": kind not in ("Namespace",), "kind": kind}
                for kind, plural in RESOURCES[path]
            ]
            found = [{**each, "verbs": verbs} for each in found]
            version = path.removeprefix("apis/").removeprefix("api/")
            return self.answer({"kind": "APIResourceList", "groupVersion": version, "resources": found})
        if path == "openapi/v3":
            return self.answer({"paths": {g: {"serverRelativeURL": f"/openapi/v3/{g}?hash=1"} for g in RESOURCES}})
        if path.startswith("openapi/v3/"):
            return self.answer(self.openapi(path.removeprefix("openapi/v3/")))
        query = parse_qs(url.query)
        if path.endswith("/log"):
            return self.answer("step 3/9  SPS 1  left 0:00:06  mean return 1.5\n", kind="text/plain")
        if path.endswith("/pods"):
            self.server.selector = query["labelSelector"][0]
            pod = {"metadata": {"name": "p", "namespace": "default"}, "spec": {"containers": [{"name": "node"}]}}
            return self.answer({"kind": "PodList", "apiVersion": "v1", "items": [pod]})
        if path in self.server.objects:
            return self.answer(self.server.objects[path])
        return self.refuse(404, "NotFound", f"{path} not found")

    def do_POST(self):
        body, path = self.body(), urlparse(self.path).path.strip("/")
        if path.endswith("selfsubjectaccessreviews"):  # kubectl sends it as protobuf
            review = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
            return self.answer({**review, "status": {"allowed": self.server.may}}, 201)
        document = json.loads(body)
        if parse_qs(urlparse(self.path).query).get("fieldValidation") != ["Strict"]:
            return self.refuse(400, "BadRequest", "kubectl did not ask for strict validation")
        wrong = fault(document)
        if wrong:
            return self.refuse(422, "Invalid", wrong.replace("\n", " ")[:300])
        name = f"{path}/{document['metadata']['name']}"
        if name in self.server.objects:
            return self.refuse(409, "AlreadyExists", f"{name} already exists")
        document["metadata"] |= {"namespace": "default", "uid": "1"}
        self.server.objects[name] = document
        return self.answer(document, 201)

    def do_DELETE(self):
        self.body()
        document = self.server.objects.pop(urlparse(self.path).path.strip("/"), None)
        if document is None:
            return self.refuse(404, "NotFound", "not found")
        return self.answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})


@pytest.fixture
def cluster(tmp_path):
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def submit(tmp_path, cluster):
    address = f"http://127.0.0.1:{cluster.server_address[1]}"
    names = {"cluster": "c", "user": "u"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": names}],
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    folder = Folder(tmp_path)
    env = {"KUBECONFIG": str(tmp_path / "kubeconfig"), "HOME": str(tmp_path), "WANDB_API_KEY": KEY}
    env |= {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def call(*words, code=0):
        return folder.run([sys.executable, "-m", "cleanrl_utils.submit_exp", *map(str, words)], code=code, **env)

    def send(*words, code=0):
        command = ["--command", "python ppo_atari_multigpu.py --track", "--docker-tag", "ghcr.io/me/cleanrl:1.0"]
        return call("--provider", "kubernetes", *command, "--wandb-secret", "wandb/key", *words, code=code)

    def record():
        (path,) = tmp_path.glob("submissions/*.json")
        return json.loads(path.read_text())

    call.send, call.record = send, record
    return call


FULL = [
    "--num-gpu",
    8,
    "--num-hours",
    2,
    "--checkpoint-dir",
    "pvc:runs",
    "--service-account",
    "trainer",
    "--job-queue",
    "q",
]
FULL += ["--spot", "--node-selector", "cloud.google.com/gke-spot=true"]


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_real_kubectl_makes_the_objects(submit, cluster, kind, nodes):
    retries = 1 if kind == "trainjob" else 3
    words = ["--kubernetes-kind", kind, "--num-nodes", nodes, "--num-retries", retries]
    done = submit.send(*words, "--num-seed", 2, *FULL)
    kinds = sorted(document["kind"] for document in cluster.objects.values())
    main = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[kind]
    assert kinds == sorted([main] * 2 + ["Service"] * 2 * (kind == "job" and nodes > 1))
    sent = "".join(data for _, _, data in cluster.requests)
    assert "secretKeyRef" in sent and KEY not in sent + done.stdout + done.stderr
    again = submit.send(*words, "--num-seed", 2, *FULL)
    assert "sent before" in again.stdout and len(cluster.objects) == len(kinds)


def test_watch_status_and_cancel(submit, cluster):
    submit.send("--num-nodes", 2, "--num-seed", 2)
    record = submit.record()
    jobs = {
        document["metadata"]["name"]: document for document in cluster.objects.values() if document["kind"] == "Job"
    }
    first, second = (jobs[job["handle"]["name"]] for job in record["jobs"])
    first["status"] = {"active": 2, "ready": 2}
    shown = submit("status", record["submission"], code=1)
    assert re.search(r"running .* 3 of 9 .* 1\.5 ", shown.stdout) and "queued" in shown.stdout
    name = first["metadata"]["name"]
    assert cluster.selector == f"batch.kubernetes.io/job-name={name},batch.kubernetes.io/job-completion-index=0"
    first["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    second["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
    watched = submit("watch", record["submission"], code=1)
    assert "succeeded" in watched.stdout and "BackoffLimitExceeded" in watched.stdout
    second["status"] = {"ready": 1}
    assert "told to end" in submit("cancel", record["submission"]).stdout
    left = [document["metadata"]["name"] for document in cluster.objects.values()]
    assert set(left) == {name}, "the ended one stays until its time is over"
    assert "cancelled" in submit("status", record["submission"], code=1).stdout


def test_what_the_cluster_refuses_is_one_line_and_continued(submit, cluster, monkeypatch):
    import test_cloud_kubernetes as this

    monkeypatch.setattr(this, "fault", lambda document: "no such field: spec.x")
    done = submit.send("--num-seed", 2, code=1)
    assert "no such field: spec.x" in done.stderr and "sent 0 of 2" in done.stderr and not cluster.objects
    monkeypatch.undo()
    submit.send("--num-seed", 2)
    assert len(cluster.objects) == 2
    cluster.may = False
    done = submit.send("--num-nodes", 2, code=1)
    assert done.stderr == "error: kubectl: you may not create job.batch here\n"
    assert len(cluster.objects) == 2


def test_the_server_refuses_bad_fields(cluster):
    """The checks check: a field that no API has, in each kind."""
    from cleanrl_utils import submit_exp

    for kind in ("job", "jobset", "trainjob"):
        argv = ["--provider", "kubernetes", "--command", "python a.py", "--docker-tag", "x", "--kubernetes-kind", kind]
        (spec,) = submit_exp.make_specs(submit_exp.parse(submit_exp.Args, argv), "a-1")
        (document,) = submit_exp.provider_of("kubernetes").render(spec)
        assert fault(document) is None
        document["spec"]["backoffLimits"] = 3
        assert fault(document)
