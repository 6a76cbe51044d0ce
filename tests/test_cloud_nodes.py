"""Two hosts, as an AWS Batch multi-node parallel job has them: network namespaces with an address and a host name each.

What is replayed is what Batch gives to a container: its variables, of which the main node lacks its own address, the
same command on all nodes, and SIGTERM to all of them when the job is to end.
https://docs.aws.amazon.com/batch/latest/userguide/multi-node-parallel-jobs.html
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MULTI, ROOT, Folder, command, final, wait_until

pytestmark = pytest.mark.cloud
if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
    pytest.skip("needs root, and iproute2: make test-cloud", allow_module_level=True)

ADDRESSES = ("10.99.0.1", "10.99.0.2")
COMMON = ["--num-steps", 16, "--num-minibatches", 2, "--update-epochs", 2, "--num-threads", 1]
SHORT = [*COMMON, "--total-timesteps", 4 * 16 * 12]
ENDLESS = [*COMMON, "--total-timesteps", 4 * 16 * 10_000]


def ip(*argv):
    done = subprocess.run(["ip", *argv], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(argv)}: {done.stderr}")
    return done.stdout


def kill_all_on(host):
    """Everything on a host ends at once, as when the machine is lost."""
    for pid in ip("netns", "pids", host).split():
        os.kill(int(pid), signal.SIGKILL)


@pytest.fixture(scope="module")
def hosts():
    """The names of two hosts, joined by a cable, with no way to anywhere else."""
    names = [f"node{i}-{secrets.token_hex(2)}" for i in range(2)]
    cable = [f"{name}-e" for name in names]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        except RuntimeError as error:
            pytest.skip(f"this machine makes no network namespaces: {error}")
        for name, end, address in zip(names, cable, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "link", "set", end, "name", "eth0")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            own = Path("/etc/netns") / name  # `ip netns exec` puts its files in the place of those in /etc
            own.mkdir(parents=True)
            (own / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        yield names
    finally:
        for name, end in zip(names, cable, strict=True):
            if name in ip("netns", "list").split():
                kill_all_on(name)
                ip("netns", "delete", name)
            subprocess.run(["ip", "link", "delete", end], capture_output=True)  # left where it was not moved in
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


def start(hosts, folder, *flags, attempt=1):
    """The same command on both nodes, with the variables that Batch sets on each: the two launchers."""
    nodes = []
    for index, name in enumerate(hosts):
        env = {
            "AWS_BATCH_JOB_NUM_NODES": "2",
            "AWS_BATCH_JOB_NODE_INDEX": str(index),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "AWS_BATCH_JOB_ATTEMPT": str(attempt),
            "PYTHONPATH": str(ROOT),
        }
        if index:
            env["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = ADDRESSES[0]
        there = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
        line = [sys.executable, "-m", "cleanrl_utils.launch", "--nproc_per_node=1", str(ROOT / MULTI)]
        flags = ["--total-num-envs", 4, "--run-name", "first", "--resume", "--checkpoint-every", 2, *flags]
        nodes.append(folder.start([*there, *line, *map(str, flags)], **env))
    return nodes


@pytest.fixture(autouse=True)
def nobody_left(hosts):
    yield
    try:
        for name in hosts:
            wait_until(lambda name=name: not ip("netns", "pids", name).split(), 20, f"nobody left on {name}")
    finally:
        for name in hosts:
            kill_all_on(name)


def ends(node, code, seconds=120):
    """What a node has written, once it has ended with this exit code."""
    out, err = node.communicate(timeout=seconds)
    assert node.returncode == code, f"exit code {node.returncode}\n{out}\n{err}"
    return out, err


def wait_for_checkpoint(folder, iteration=2):
    path = folder.path / "runs" / "first"
    newest = lambda: max((int(p.stem.split("-")[1]) for p in path.glob("checkpoint-*.pt")), default=0)  # noqa: E731
    wait_until(lambda: newest() >= iteration, 180, f"checkpoint {iteration}")


@pytest.fixture(scope="module")
def uninterrupted(hosts, tmp_path_factory):
    """The outputs of both nodes of a job that runs to its end."""
    nodes = start(hosts, Folder(tmp_path_factory.mktemp("uninterrupted")), *SHORT)
    return [ends(node, 0) for node in nodes]


def test_two_nodes_are_the_run_of_two_processes_on_one(uninterrupted, folder):
    (out, err), (child_out, child_err) = uninterrupted
    assert "node 0 of 2, the first is 127.0.0.1:" in err
    assert f"node 1 of 2, the first is {ADDRESSES[0]}:" in child_err
    assert "final:" not in child_out  # one process speaks for the job
    together = folder.run(command(MULTI, "--total-num-envs", 4, *SHORT, nproc=2))
    assert final(out) == final(together.stdout) and final(out)[0] == 4 * 16 * 12


def test_the_next_attempt_continues_what_sigterm_ended(hosts, folder, uninterrupted):
    """Batch sends SIGTERM to all containers; code 75 has it try again, and the same command goes on, bit for bit."""
    nodes = start(hosts, folder, *SHORT)
    wait_for_checkpoint(folder)
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    for node in nodes:
        ends(node, 75)
    main, child = start(hosts, folder, *SHORT, attempt=2)
    ends(child, 0)
    assert final(ends(main, 0)[0]) == final(uninterrupted[0][0])


def test_a_lost_child_node_ends_the_main_node(hosts, folder):
    """Batch retries a job by what its main node does, whatever becomes of the others."""
    main, child = start(hosts, folder, *ENDLESS)
    wait_for_checkpoint(folder)
    kill_all_on(hosts[1])
    assert child.wait(20) == -signal.SIGKILL
    main.communicate(timeout=120)
    assert main.returncode not in (0, 2)


def test_a_cut_cable_ends_the_main_node(hosts, folder):
    """A machine that loses its power says nothing: the others wait for the process group's timeout."""
    main, _ = start(hosts, folder, *ENDLESS)
    wait_for_checkpoint(folder)
    ip("-n", hosts[1], "link", "set", "eth0", "down")
    try:
        main.communicate(timeout=600)
        assert main.returncode not in (0, 2)
    finally:
        ip("-n", hosts[1], "link", "set", "eth0", "up")
        kill_all_on(hosts[1])


def test_a_usage_error_ends_both_nodes_with_its_code(hosts, folder):
    """2 is not retried."""
    said = [ends(node, 2) for node in start(hosts, folder, "--gamma", 2, *SHORT)]
    assert sum("error: --gamma 2" in err for _, err in said) == 1
    assert not (folder.path / "runs").exists()
