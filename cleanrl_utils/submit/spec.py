"""One job as every provider sees it, how a command becomes its arguments, and the rules that all providers share."""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cleanrl_utils.config import Fault, UsageError, require
from cleanrl_utils.runs import Place, split

KEY = "WANDB_API_KEY"  # the variable that a secret reference becomes
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
WORKDIR = "/train"  # of the image; its scripts write to runs/ below it
GRACE = 120  # seconds that a stopped container gets to end its iteration; Spot machines are gone after two minutes
# https://pkg.go.dev/github.com/distribution/reference: only the host and the tag may have capitals
_HOST = r"([A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|localhost|[A-Za-z0-9-]+(?=:))(:\d+)?"
_PART = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"
IMAGE = rf"({_HOST}/)?{_PART}(/{_PART})*(:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?"
OWN_FLAGS = ("--seed", "--run-name", "--resume", "--checkpoint-dir")

Provider = Literal["aws", "kubernetes", "slurm", "docker", "local"]
State = Literal["queued", "running", "succeeded", "failed", "cancelled", "unknown"]


@dataclass(frozen=True)
class Status:
    """Where a job is; `attempt` counts from 1, `reason` is the scheduler's own word."""

    state: State
    attempt: int = 1
    reason: str = ""


@dataclass(frozen=True)
class JobSpec:
    """One training run. Sizes are of each node; nothing in it is secret, `secret` only says where the key is."""

    name: str
    """the run's name, from which each provider makes a name that it allows"""
    argv: tuple[str, ...]
    """the whole command, from `python` on"""
    submission: str
    env_id: str | None
    seed: int
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    queue: str | None = None
    num_nodes: int = 1
    num_gpu: int = 0
    place: Place = field(default_factory=Place)
    """the job's own cores and GPUs of this machine, where it runs here"""
    num_vcpu: int | None = 4
    memory: int | None = 8000
    """MiB, with the shared memory; as num_vcpu None on the own machine: no limit"""
    shm_size: int | None = 1024
    """MiB of /dev/shm"""
    time_limit: int | None = None
    """seconds of an attempt"""
    attempts: int = 1
    spot: bool = False
    secret: str | None = None
    checkpoint_dir: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """what only one provider knows: roles, namespace, ..."""

    @property
    def logs(self) -> str:
        """Path of the log, where the job's output is a file here; its exit code is beside it."""
        return os.path.abspath(f"submissions/{self.submission}/{self.name}.log")


def short_name(name: str, limit: int, alphabet: str = "A-Za-z0-9_-") -> str:
    """`name` in an alphabet and a length, begun and ended by a letter or a digit, still unique where it was cut.

    >>> short_name("ghcr.io/me/cleanrl:1.0", 128)
    'ghcr-io-me-cleanrl-1-0'
    """
    clean = re.sub(rf"[^{alphabet}]+", "-", name).strip("-_.") or "job"
    if len(clean) <= limit:
        return clean
    return f"{clean[: limit - 9].rstrip('-_.')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def split_command(text: str) -> list[str]:
    """The words of `python SCRIPT.py [FLAGS]`; a usage error where the command is anything else."""
    words = split(text, OWN_FLAGS)
    python = len(words) > 1 and re.fullmatch(r"python3?(\.\d+)?", words[0]) and words[1].endswith(".py")
    rule = "must be `python SCRIPT.py [FLAGS]`; the launcher, torchrun and the scheduler's commands are added"
    require(bool(python), "--command", "", rule)
    return words


def flag_value(words: Sequence[str], flag: str) -> str | None:
    """The value that a command gives to a flag, as `--flag value` or `--flag=value`."""
    for word, following in zip(words, [*words[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else following
    return None


def launched(python: str, words: Sequence[str], num_nodes: int, num_processes: int, added: Sequence[str]) -> list[str]:
    """A script's command, run by `cleanrl_utils.launch` on each node."""
    options: list[str] = []
    if num_nodes > 1:  # the launcher adds the nodes from the scheduler's variables
        options = [f"--nproc_per_node={num_processes}"]
    elif num_processes > 1:
        options = ["--standalone", f"--nproc_per_node={num_processes}"]
    return [python, "-m", "cleanrl_utils.launch", *options, *words[1:], *added]


def check_env(env: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` words as a dictionary."""
    result = {}
    for word in env:
        name, equals, value = word.partition("=")
        require(bool(equals), "--env", name, "must be NAME=VALUE")  # not the value: it may be a key
        require(bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)), "--env", name, "must be NAME=VALUE")
        secret = SECRET_NAME.search(name) is None
        require(secret, "--env", name, "looks like a secret, and this would be readable; use --wandb-secret")
        require(name not in result, "--env", name, "is there twice")
        result[name] = value
    return result


def check_secrets(documents: str, reference: str | None) -> None:
    """Refuse to send what holds the value of a secret variable of this process, unless that is the reference itself."""
    for name, value in os.environ.items():
        told = value in documents or json.dumps(value)[1:-1] in documents  # quotes and the like are escaped in JSON
        if SECRET_NAME.search(name) and len(value) >= 16 and value != reference and told:
            raise UsageError(f"the value of {name} is in what would be sent or written; use --wandb-secret")


def check(spec: JobSpec) -> None:
    """The rules of every provider."""
    if spec.memory is not None:
        rule = f"must be below --num-memory {spec.memory}, of which it is a part"
        require((spec.shm_size or 0) < spec.memory, "--shm-size", spec.shm_size, rule)
    require(1 <= spec.attempts <= 10, "--num-retries", spec.attempts, "must be 1 .. 10 attempts")
    if spec.image is not None:
        good = len(spec.image) <= 255 and re.fullmatch(IMAGE, spec.image)
        require(bool(good), "--docker-tag", spec.image, "must be an image such as registry/name:tag, in lower case")
    lasting = spec.checkpoint_dir is not None
    why = "needs --checkpoint-dir: a retry is worth nothing without checkpoints that outlive the machine"
    require(lasting or not spec.spot, "--spot", "", why)
    require(lasting or spec.attempts == 1, "--num-retries", spec.attempts, why)


def outlives(folder: str) -> bool:
    """Whether it is a URL of what a container does not take with it."""
    store, colon, _ = folder.partition("://")
    return colon != "" and store not in ("file", "local", "memory")


def call(argv: Sequence[str], stdin: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """A command's output; a `Fault` with its own words where it fails."""
    try:
        done = subprocess.run(argv, input=stdin, env=env, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise Fault(f"{argv[0]} is not installed here") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise Fault(f"{argv[0]} {argv[1]}: {' '.join(lines)}")
    return done.stdout


def read_exit(path: str) -> int | None:
    """A job's exit code, which is written beside its log when it has ended."""
    try:
        with open(f"{path}.exit") as file:
            return int(file.read())
    except (FileNotFoundError, ValueError):
        return None
