"""SLURM for real: a controller and two nodes on this machine, in a mount namespace with a hosts file of its own."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import MULTI, ROOT, Folder, command, environment, final, free_port, wait_until

pytestmark = [pytest.mark.cloud]
if os.geteuid() != 0 or shutil.which("slurmctld") is None:
    pytest.skip("needs root, and slurm-wlm and munge", allow_module_level=True)

KEY = "sentinel-" + "5" * 31
FLAGS = "--total-num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2 --num-threads 1 --checkpoint-every 1"
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={path}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/spool-%n
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/%n.pid
SlurmctldLogFile={path}/slurmctld.out
SlurmdLogFile={path}/%n.out
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
KillWait=60
GresTypes=gpu
NodeName=node0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=64000 Gres=gpu:1
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=64000 Gres=gpu:1
PartitionName=main Nodes=node0,node1 Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """The daemons, and commands that see them."""

    def __init__(self, path):
        self.path, self.daemons = path, []
        ports = [free_port() for _ in range(3)]
        (path / "slurm.conf").write_text(CONF.format(path=path, ports=ports, host=socket.gethostname()))
        (path / "gres.conf").write_text("NodeName=node[0-1] Name=gpu File=/dev/null\n")
        (path / "hosts").write_text(Path("/etc/hosts").read_text() + "127.0.0.1 node0 node1\n")
        (path / "munge.key").write_bytes(os.urandom(128))
        (path / "munge.key").chmod(0o400)
        for folder in ("state", "spool-node0", "spool-node1"):
            (path / folder).mkdir()
        self.env = {"SLURM_CONF": str(path / "slurm.conf"), "PYTHONPATH": str(ROOT)}
        munge = ["munged", "--foreground", "--force", f"--socket={path}/munge.socket", f"--key-file={path}/munge.key"]
        munge += [f"--log-file={path}/munge.out", f"--pid-file={path}/munge.pid", f"--seed-file={path}/munge.seed"]
        self.start(munge)
        wait_until((path / "munge.socket").exists, 20, "munged listens")
        self.start(["slurmctld", "-D"])
        for node in ("node0", "node1"):
            self.start(["slurmd", "-D", "-N", node])
        wait_until(lambda: self.call("sinfo", "-h", "-o", "%D %t", check=False).strip() == "2 idle", 60, "two nodes")

    def start(self, argv):
        mounted = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', f"{self.path}/hosts"]
        with open(self.path / f"{argv[0]}{len(self.daemons)}.log", "w") as log:
            daemon = subprocess.Popen([*mounted, *argv], env=environment(**self.env), stdout=log, stderr=log)
        self.daemons.append(daemon)

    def call(self, *argv, check=True):
        done = subprocess.run(argv, env=environment(**self.env), capture_output=True, text=True, check=check)
        return done.stdout

    def close(self):
        with contextlib.suppress(subprocess.SubprocessError):
            self.call("scancel", "--user=root")
            wait_until(lambda: not self.call("squeue", "-h").strip(), 90, "no job is left")
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


class Jobs(Folder):
    """A folder from which jobs are sent to the cluster."""

    def __init__(self, path, cluster):
        super().__init__(path)
        self.cluster = cluster

    def submit(self, *words, code=0):
        argv = [sys.executable, "-m", "cleanrl_utils.submit_exp", *words]
        return self.run(argv, code=code, WANDB_API_KEY=KEY, **self.cluster.env)

    def record(self):
        (path,) = (self.path / "submissions").glob("*.json")
        return json.loads(path.read_text())

    def job(self):
        return self.record()["jobs"][0]

    def state(self):
        return self.cluster.call("squeue", "-h", "-t", "all", "-j", self.job()["handle"]["job_id"], "-o", "%T").strip()

    def log(self):
        path = Path(self.job()["handle"]["log"])
        return path.read_text() if path.exists() else ""


@pytest.fixture
def jobs(tmp_path, cluster):
    (tmp_path / "a folder").mkdir()
    return Jobs(tmp_path / "a folder", cluster)


def flags(script):
    return ["--provider", "slurm", "--command", script, "--num-vcpu", "2", "--num-memory", "4000"]


def test_two_nodes_requeued_and_preempted_are_the_uninterrupted_run(jobs, cluster):
    """scontrol requeue, then the signal that comes before a time limit: the job goes on, bit for bit."""
    steps = 24 * 128
    words = f"{FLAGS} --total-timesteps {steps}"
    jobs.submit(
        *flags(f"python {ROOT / MULTI} {words}"), "--num-nodes", "2", "--num-retries", "3", "--checkpoint-dir", "kept"
    )
    job = jobs.job()
    kept = jobs.path / "kept" / job["name"]

    def checkpoints():
        return sorted(int(path.stem.rpartition("-")[2]) for path in kept.glob("checkpoint-*.pt"))

    wait_until(lambda: checkpoints()[-1:] > [2], 120, jobs.log)
    cluster.call("scontrol", "requeue", job["handle"]["job_id"])
    wait_until(lambda: jobs.state() != "RUNNING", 60, "SLURM ends the job")
    first = checkpoints()[-1]
    assert first < 20
    wait_until(lambda: checkpoints()[-1] > first + 2, 240, "the job goes on")
    cluster.call("scancel", "--batch", "--signal=USR1", job["handle"]["job_id"])  # as --signal=B:USR1@300 does
    wait_until(lambda: jobs.state() != "RUNNING", 60, "the job requeues itself")
    assert checkpoints()[-1] < 24
    watched = jobs.submit("watch", jobs.record()["submission"])
    assert "succeeded" in watched.stdout and " 3 " in watched.stdout and f"{steps:,} of {steps:,}" in watched.stdout
    log = jobs.log()
    assert log.count("node 1 of 2, the first is node0:") == 3 and log.count("from step ") == 2
    alone = jobs.run(command(MULTI, *words.split(), nproc=2))
    assert final(log) == final(alone.stdout)


def test_the_key_is_read_on_the_node_and_nowhere_else(jobs, cluster):
    (jobs.path / "show.py").write_text(
        "import os, time\nprint(f\"key of {len(os.environ['WANDB_API_KEY'])} in {os.environ['SLURM_PROCID']}\")\n"
        "time.sleep(2)\n"
    )
    secret = jobs.path / "key"
    secret.write_text(KEY + "\n")
    shown = jobs.submit(*flags("python show.py"), "--wandb-secret", str(secret), code=2)
    assert "chmod 600" in shown.stderr and KEY not in shown.stderr
    secret.chmod(0o600)
    sent = jobs.submit(
        *flags("python show.py"), "--num-nodes", "2", "--wandb-secret", str(secret), "--num-hours", "0.1"
    )
    job_id = jobs.job()["handle"]["job_id"]
    wait_until(lambda: jobs.state() in ("RUNNING", "COMPLETED"), 60, "it runs")
    time.sleep(0.5)
    kept = {}
    for path in [*cluster.path.rglob("*"), *jobs.path.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # the controller replaces its files
            kept |= {path: path.read_bytes()} if path.is_file() else {}
    assert any(path.name == "script" for path in kept), "the controller's copy of the script is among them"
    assert [path for path, data in kept.items() if KEY.encode() in data] == [secret]
    assert KEY not in cluster.call("scontrol", "show", "job", "-dd", job_id)
    watched = jobs.submit("watch", jobs.record()["submission"])
    assert jobs.log().count(f"key of {len(KEY)} in") == 2
    assert KEY not in sent.stdout + sent.stderr + watched.stdout + watched.stderr + jobs.log()


def test_a_usage_error_is_not_retried_and_a_cancelled_job_stays_cancelled(jobs, cluster):
    retries = ("--num-retries", "5", "--checkpoint-dir", "kept")
    words = flags(f"python {ROOT / MULTI} --num-minibatches 5")  # which `Args` does not refuse, but the script
    done = jobs.submit(*words, *retries, "--watch", code=1)
    assert "exit code 2" in done.stdout and "error: --num-minibatches 5: must divide the 128 steps" in done.stdout
    assert "REQUEUE" not in jobs.log()
    shutil.rmtree(jobs.path / "submissions")

    jobs.submit(*flags(f"python {ROOT / MULTI} {FLAGS}"), *retries)
    wait_until(lambda: "checkpoint: " in jobs.log(), 120, "it trains")
    jobs.submit("cancel", jobs.record()["submission"])
    wait_until(lambda: jobs.state() == "CANCELLED", 60, "it has ended")
    assert "stopped after iteration " in jobs.log()
    shown = jobs.submit("status", jobs.record()["submission"], code=1)
    assert "cancelled" in shown.stdout


def test_a_wrong_partition_is_found_before_anything_is_sent(jobs):
    (jobs.path / "a.py").write_text("")
    done = jobs.submit(*flags("python a.py"), "--job-queue", "nope", code=1)
    assert "error: --job-queue nope: no such partition; there are main" in done.stderr
    assert not list((jobs.path / "submissions").glob("*.json"))
