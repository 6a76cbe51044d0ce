"""submit_exp: what each provider would be sent, moto's Batch, real local processes, and no secret anywhere."""

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import yaml
from conftest import MULTI, PATIENCE, ROOT, SINGLE, Folder, command, final, wait_until

from cleanrl_utils import launch, runs, submit_exp
from cleanrl_utils.config import Fault, UsageError
from cleanrl_utils.submit import aws, kubernetes, local, script, slurm, spec, watch
from cleanrl_utils.submit.spec import Status

KEY = "sentinel-" + "7" * 77  # as long as today's W&B keys
IMAGE = "ghcr.io/me/cleanrl:1.0@sha256:" + "0" * 64
COMMAND = "python ppo_atari_multigpu.py --total-timesteps 1000"
ARN = "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb-AbCdEf"
ROLE = "arn:aws:iam::123456789012:role/execution"


@pytest.fixture
def submit(tmp_path, monkeypatch, capfd):
    """Calls the command line in a folder of its own; returns its exit code, what it printed, and its records."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    (tmp_path / "ppo_atari_multigpu.py").write_text("")  # of the real one submit_exp would ask the flags: seconds

    def call(*words):
        code = submit_exp.main(list(map(str, words)))
        out, err = capfd.readouterr()
        records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("submissions/*.json"))]
        return SimpleNamespace(code=code, out=out, err=err, records=records)

    return call


def specs(provider, *words, command=COMMAND):
    if provider in submit_exp.IMAGES:
        words = ("--docker-tag", IMAGE, *words)
    if provider == "aws":
        words = ("--job-queue", "gpus", *words)
    argv = ["--provider", provider, "--command", command, *map(str, words)]
    return submit_exp.make_specs(submit_exp.parse(submit_exp.Args, argv), "exp-0a1b2c3d")


def rendered(provider, *words, **more):
    return [submit_exp.provider_of(provider).render(each) for each in specs(provider, *words, **more)]


# --- the command and the rules ----------------------------------------------------------------------------------------


def test_a_command_is_split_as_a_shell_would_and_refused_where_only_a_shell_could_run_it():
    assert spec.split_command("python a.py --exp-name 'two words'") == ["python", "a.py", "--exp-name", "two words"]
    for shell in (
        "| tee log",
        "> log",
        "; ls",
        "&& ls",
        "& ",
        "--exp-name $X",
        "--exp-name $(date)",
        "--x `date`",
        "\nls",
    ):
        with pytest.raises(UsageError, match="--command: runs without a shell, which `"):
            spec.split_command(f"python a.py {shell}")
    for wrapped in ("torchrun a.py", "KEY=1 python a.py", "python -m a", "poetry run python a.py", "python", ""):
        with pytest.raises(UsageError, match=r"must be `python SCRIPT.py"):
            spec.split_command(wrapped)
    for flag in ("--seed 3", "--run_name x", "--resume", "--checkpoint-dir=x"):
        with pytest.raises(UsageError, match=r"must be without --[a-z-]+, which each run gets from here"):
            spec.split_command(f"python a.py {flag}")
    with pytest.raises(UsageError, match="No closing quotation"):
        spec.split_command("python a.py '")


def test_games_and_seeds_become_runs_of_their_own():
    jobs = specs("aws", "--env-ids", "ALE/Pong-v5", "BreakoutNoFrameskip-v4", "--num-seed", 2, "--start-seed", 5)
    assert [(job.env_id, job.seed) for job in jobs] == [
        *(("ALE/Pong-v5", 5), ("ALE/Pong-v5", 6), ("BreakoutNoFrameskip-v4", 5), ("BreakoutNoFrameskip-v4", 6))
    ]
    assert len({job.name for job in jobs}) == 4
    name = "ALE-Pong-v5__ppo_atari_multigpu__5__0a1b2c3d"
    added = ["--env-id", "ALE/Pong-v5", "--seed", "5", "--run-name", name, "--resume"]
    assert list(jobs[0].argv) == ["python", "-m", "cleanrl_utils.launch", *shlex.split(COMMAND)[1:], *added]
    assert specs("aws", command=f"{COMMAND} --env-id=Pong --exp-name x")[0].name == "Pong__x__1__0a1b2c3d"


def test_processes_and_sizes_follow_from_the_gpus():
    for words, options in (
        ([], []),
        (["--num-gpu", 1], []),
        (["--num-gpu", 2], ["--standalone", "--nproc_per_node=2"]),
        (["--num-processes", 3], ["--standalone", "--nproc_per_node=3"]),
        (["--num-processes", 3, "--num-gpu", 2], ["--standalone", "--nproc_per_node=3"]),  # these share them
        (["--num-gpu", 8, "--num-nodes", 2], ["--nproc_per_node=8"]),
        (["--num-nodes", 2], ["--nproc_per_node=1"]),
    ):
        (job,) = specs("kubernetes", *words)
        assert list(job.argv[3:]) == [*options, *job.argv[3 + len(options) :]]
        assert job.argv[3 + len(options)] == "ppo_atari_multigpu.py"
    (job,) = specs("aws", "--num-gpu", 2)
    assert (job.num_vcpu, job.memory, job.shm_size) == (8, 16000, 2048)
    (job,) = specs("aws", "--num-gpu", 2, "--num-vcpu", 3, "--num-memory", 5000, "--shm-size", 100)
    assert (job.num_vcpu, job.memory, job.shm_size) == (3, 5000, 100)


OUTPUTS = {
    "region": "eu-west-1",
    "job_queues": {
        "t4": {"machine": "g4dn.12xlarge", "spot": False, "gpus": 4, "vcpus": 48, "memory_mib": 180_000},
        "t4-spot": {"machine": "g4dn.12xlarge", "spot": True, "gpus": 4, "vcpus": 48, "memory_mib": 180_000},
    },
    "execution_role_arn": ROLE,
    "job_role_arn": ROLE.replace("execution", "job"),
    "wandb_secret_arn": ARN,
    "checkpoint_url": "s3://checkpoints",
    "log_group": "/cleanrl/jobs",
}


def test_terraform_s_outputs_give_roles_checkpoints_and_the_machine(tmp_path):
    path = tmp_path / "cloud.json"
    path.write_text(json.dumps({name: {"value": value, "sensitive": False} for name, value in OUTPUTS.items()}))

    def with_queue(queue, *words):
        return specs("aws", "--terraform-outputs", path, "--job-queue", queue, *words, command=f"{COMMAND} --track")

    (job,) = with_queue("t4", "--num-gpu", 2)
    assert (job.num_vcpu, job.memory) == (24, 90_000), "half of the machine"
    document = aws.render(job)
    container = document["definition"]["containerProperties"]
    assert container["secrets"] == [{"name": "WANDB_API_KEY", "valueFrom": ARN}]
    assert (container["executionRoleArn"], container["jobRoleArn"]) == (ROLE, OUTPUTS["job_role_arn"])
    options = {"awslogs-group": "/cleanrl/jobs", "awslogs-stream-prefix": "cleanrl", "awslogs-region": "eu-west-1"}
    assert container["logConfiguration"] == {"logDriver": "awslogs", "options": options}
    assert job.argv[-2:] == ("--checkpoint-dir", "s3://checkpoints")
    assert with_queue("t4-spot")[0].spot and with_queue("t4-spot")[0].attempts == 5 and job.attempts == 1
    for words, error in (
        (["nope"], "--job-queue nope: must be one of t4, t4-spot"),
        (["t4", "--spot"], "--spot: t4 has on-demand machines"),
        (["t4", "--num-gpu", 5], "--num-gpu 5: a machine of t4, g4dn.12xlarge, has 4"),
        (["t4-spot", "--num-nodes", 2], "--spot: is not possible with --num-nodes 2"),
    ):
        with pytest.raises(UsageError, match=re.escape(error)):
            with_queue(*words)
    path.write_text("[]")
    with pytest.raises(UsageError, match="not the file of `terraform output -json`"):
        with_queue("t4")
    words = json.dumps({"job_queues": {"value": {"t4": {**OUTPUTS["job_queues"]["t4"], "gpus": "4"}}}})
    for nothing in ("{}", '{"job_queues": {"value": null}}', '{"job_queues": {"value": {"t4": {}}}}', words):
        path.write_text(nothing)  # before `terraform apply`, or of other outputs
        with pytest.raises(UsageError, match="has no job_queues as cloud/ makes them"):
            with_queue("t4")


REFUSED = [
    ("aws", ["--num-hours", 0.01], "--num-hours 0.01: must be 60 seconds or more"),
    ("aws", ["--aws-num-retries", 11, "--checkpoint-dir", "s3://b"], "--num-retries 11: must be 1 .. 10 attempts"),
    ("aws", ["--num-retries", 2], "--num-retries 2: needs --checkpoint-dir"),
    ("aws", ["--num-retries", 2, "--checkpoint-dir", "runs"], "--checkpoint-dir runs: must be a URL"),
    ("aws", ["--spot"], "--spot: needs --checkpoint-dir"),
    ("aws", ["--num-nodes", 1001], "--num-nodes 1001: must be 1 .. 1000"),
    ("aws", ["--env", "AWS_BATCH_X=1"], "--env AWS_BATCH_X: must not start with AWS_BATCH"),
    ("aws", ["--env", "X"], "--env X: must be NAME=VALUE"),
    ("aws", ["--env", "X="], "--env X: must not be empty"),
    ("aws", ["--env", "X=1", "X=2"], "--env X: is there twice"),
    ("aws", ["--env", "X=1", "--env", "Y=2"], "--env: is there twice; write --env ONE TWO"),
    ("aws", ["--num-seed", 2, "--env", "WANDB_RUN_ID=x"], "--env WANDB_RUN_ID: is one W&B run, and these are 2"),
    ("local", ["--num-gpu", 1, "--env", "CUDA_VISIBLE_DEVICES=1"], "--env CUDA_VISIBLE_DEVICES: is given by --num-gpu"),
    ("aws", ["--num-hours", 1e308], "--num-hours 1e+308: must be 596523 or less"),
    ("slurm", ["--num-hours", 600_000], "--num-hours 600000.0: must be 596523 or less"),
    ("aws", ["--checkpoint-dir", ""], "--checkpoint-dir '': must not be empty"),
    ("local", ["--env-ids", ""], "--env-ids '': must not be empty"),
    ("aws", ["--wandb-api-key", "unknown"], "--wandb-api-key: a key on a command line can be read by others"),
    ("aws", ["--job-queue", "a\nb"], "--job-queue 'a\\nb': must be a queue's name"),
    ("slurm", ["--job-queue", "a\nb"], "--job-queue 'a\\nb': must be a partition"),
    ("aws", ["--checkpoint-dir", "file:///x"], "--checkpoint-dir file:///x: must be a URL such as s3://"),
    ("kubernetes", ["--checkpoint-dir", "memory://x"], "--checkpoint-dir memory://x: must be a URL such as s3://"),
    ("docker", ["--checkpoint-dir", "file:///x"], "--checkpoint-dir file:///x: must be a folder, which is mounted"),
    ("slurm", ["--num-retries", 2, "--checkpoint-dir", "pvc:x"], "--checkpoint-dir pvc:x: pvc: is of Kubernetes only"),
    ("kubernetes", ["--num-nodes", 1001], "--num-nodes 1001: must be 1 .. 1000"),
    ("local", ["--num-gpu", 10**12], "--num-gpu 1000000000000: must be 1000 or less"),
    ("slurm", ["--num-memory", 10**12], "--num-memory 1000000000000: must be 1000000000 or less"),
    ("aws", ["--env", f"WANDB_API_KEY={KEY}"], "--env WANDB_API_KEY: looks like a secret"),
    ("aws", ["--env", f"X={KEY}"], "the value of WANDB_API_KEY is in what would be sent"),
    ("aws", ["--wandb-secret", KEY], "--wandb-secret: must be the ARN"),
    ("aws", ["--wandb-secret", ARN], f"--wandb-secret {ARN}: needs --execution-role-arn"),
    ("aws", ["--execution-role-arn", "me"], "--execution-role-arn me: must be the ARN of an IAM role"),
    ("aws", ["--job-queue", "a b"], "--job-queue a b: must be a queue's name or ARN"),
    ("aws", ["--shm-size", 8000], "--shm-size 8000: must be below --num-memory 8000"),
    ("aws", ["--num-memory", 1], "--num-memory 1: must be 300 or more for each of 1 process(es)"),
    ("slurm", ["--num-memory", 599, "--num-processes", 2], "--num-memory 599: must be 300 or more for each of 2"),
    ("kubernetes", ["--num-gpu", 3, "--num-processes", 2], "--num-gpu 3: --num-processes 2 would leave 1 of them idle"),
    ("aws", ["--docker-tag", "Me/X:1"], "--docker-tag Me/X:1: must be an image"),
    ("kubernetes", ["--docker-tag", "ghcr.io/Me/x:1"], "--docker-tag ghcr.io/Me/x:1: must be an image"),
    ("aws", ["--env", "X=" + "y" * 9000], "must fit in 8192"),
    ("aws", ["--namespace", "x"], "--namespace x: applies to --provider kubernetes only"),
    ("aws", ["--env-ids", "A", "A"], "--env-ids A A: names a game twice"),
    ("aws", ["--archs", "linux/arm64"], "--archs linux/arm64: needs --build"),
    ("kubernetes", ["--wandb-secret", KEY], "--wandb-secret: must be NAME/KEY"),
    ("kubernetes", ["--checkpoint-dir", "/data"], "--checkpoint-dir /data: must be a URL such as"),
    ("kubernetes", ["--checkpoint-dir", "pvc:A_b"], "--checkpoint-dir pvc:A_b: must be a URL such as"),
    ("kubernetes", ["--namespace", "Me"], "--namespace Me: must be a lower-case DNS label"),
    ("kubernetes", ["--job-queue", "a_b"], "--job-queue a_b: must be the name of a Kueue LocalQueue"),
    ("kubernetes", ["--node-selector", "a=1", "a=2"], "--node-selector a a: names a label twice"),
    ("kubernetes", ["--node-selector", "a"], "--node-selector a: must be LABEL=VALUE"),
    ("kubernetes", ["--spot", "--checkpoint-dir", "s3://b"], "--spot: needs --node-selector"),
    ("kubernetes", ["--kubernetes-kind", "trainjob", "--num-retries", 2, "--checkpoint-dir", "s3://b"], "use jobset"),
    ("kubernetes", ["--job-role-arn", ROLE], f"--job-role-arn {ROLE}: applies to --provider aws only"),
    ("slurm", ["--spot", "--checkpoint-dir", "x"], "--spot: does not apply to SLURM"),
    ("slurm", ["--docker-tag", "x"], "--docker-tag x: applies to --provider aws and kubernetes and docker only"),
    ("slurm", ["--wandb-secret", KEY], "--wandb-secret: must be the absolute path of a file"),
    ("docker", ["--num-nodes", 2], "--num-nodes 2: must be 1 with --provider docker"),
    ("docker", ["--num-hours", 1], "--num-hours 3600: has no effect on this machine"),
    ("docker", ["--wandb-secret", KEY], "--wandb-secret: must be `env` here"),
    ("docker", ["--checkpoint-dir", "a:b"], "a:b: must be without a colon"),
    ("kubernetes", ["--command", "python ppo_atari.py", "--num-processes", 2], "ppo_atari.py is one process"),
    ("docker", ["--job-queue", "x"], "--job-queue x: has no effect on this machine"),
    ("local", ["--num-seed", 2, "--num-vcpu", 9999], "--num-vcpu 9999: this machine has "),
    ("local", ["--num-memory", 100], "--num-memory 100: limits nothing without a container"),
    ("local", ["--num-retries", 2, "--checkpoint-dir", "x"], "--num-retries 2: has no effect on this machine"),
]


@pytest.mark.parametrize(
    "provider, words, error", REFUSED, ids=[f"{p} {' '.join(map(str, w))[:40]}" for p, w, _ in REFUSED]
)
def test_bad_requests_are_one_line_before_anything_is_sent(submit, provider, words, error, tmp_path):
    given = ["--provider", provider, "--command", COMMAND]
    given += ["--docker-tag", IMAGE] if provider in submit_exp.IMAGES else []
    given += ["--job-queue", "q"] if provider == "aws" else []
    done = submit(*given, *words)
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1
    assert error in done.err and KEY not in done.err and "unknown" not in done.err
    assert not (tmp_path / "submissions").exists()


def test_the_command_line_itself(submit):
    for words, error in (
        (["--command", COMMAND], "--provider"),
        (["--provider", "", "--command", COMMAND], "--provider"),
        (["--provider", "local", "--command", COMMAND, "--wandb-key", KEY], "--wandb-key: a key on a command line"),
        (["--provider", "local", "--command", COMMAND, f"--wandb_key={KEY}"], "--wandb-key: a key on a command line"),
        (["--provider", "local", "--command", "python nope.py"], "nope.py is not a file of this folder"),
        (
            ["--provider", "docker", "--docker-tag", "x", "--command", f"{COMMAND} --track"],
            "--track: needs --wandb-secret",
        ),
        (["--provider", "aws", "--command", COMMAND], "--docker-tag: is needed"),
        (["status", "nope"], "nope: not a submission of this folder"),
        (["status"], "submission"),
    ):
        done = submit(*words)
        assert done.code == 2 and error in done.err and done.err.count("\n") == 1 and KEY not in done.err, words


def test_the_script_is_asked_whether_it_takes_the_flags(submit, tmp_path, capfd):
    shutil.copy(ROOT / "ppo_atari.py", tmp_path)
    line = ["--provider", "docker", "--docker-tag", "x", "--command"]
    done = submit(*line, "python ppo_atari.py --total-timestep 64")
    assert done.code == 2 and done.out == "" and not (tmp_path / "submissions").exists()
    assert done.err.startswith(
        "error: --command: ppo_atari.py, as it is here, refuses it: Unrecognized options: --total"
    )
    assert done.err.count("\n") == 1 and "perhaps you meant --total-timesteps" in done.err

    own = ["--seed", "1", "--run-name", "x", "--resume", "--checkpoint-dir", "s3://b"]  # which submit_exp adds
    for flags, code, error in (
        (["--gamma", "0.9", "--track"], 0, ""),
        (["--gamma", "2"], script.REFUSED, "--gamma 2.0: must be between 0 and 1\n"),
        (["--env-id", "Pnog-v5"], script.REFUSED, "--env-id Pnog-v5: must be an Atari game"),
        (["--total-num-envs", "4"], script.REFUSED, "Unrecognized options: --total-num-envs"),
    ):
        assert script.ask("ppo_atari.py", [own, [*flags, *own]]) == code, flags
        assert capfd.readouterr().err.startswith(error), flags

    parts = "class Agent: ...\nclass Args: ...\ndef make_env(): ...\n"
    for source, why in (
        (f"import only_the_image_has_it\n{parts}", "ModuleNotFoundError: No module named 'only_the_image_has_it'"),
        (parts.replace("Args", "Flags"), "it defines no Args"),
    ):
        (tmp_path / "other.py").write_text(source)
        done = submit(*line, "python other.py --anything", "--dry-run")
        assert done.code == 0, done.err
        assert done.err.startswith(f"notice: the flags of other.py were not checked: {why}\n")


def test_help_is_quick_and_needs_no_extra():
    heavy = "{'torch', 'numpy', 'boto3', 'rich', 'yaml', 'tensorboard'}"
    script = "import sys\nfrom cleanrl_utils import submit_exp\ntry: submit_exp.main(['--help'])\n"
    script += f"finally: assert not {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "--job-queue" in done.stdout, done.stderr


def test_a_variable_that_only_says_where_the_key_is_is_no_secret(submit, monkeypatch, tmp_path):
    key = tmp_path / "the-key-of-this-folder"
    key.write_text("x")
    key.chmod(0o600)
    monkeypatch.setenv("WANDB_KEY_FILE", str(key))
    done = submit("--provider", "slurm", "--command", COMMAND, "--wandb-secret", key, "--dry-run")
    assert done.code == 0, done.err


# --- what is sent -----------------------------------------------------------------------------------------------------


def conforms(shape, value, where="request"):
    """A request against botocore's model, with the enumerations, which botocore itself does not check."""
    if shape.type_name == "structure":
        assert isinstance(value, dict) and set(value) <= set(shape.members), (where, set(value) - set(shape.members))
        assert set(shape.required_members) <= set(value), (where, shape.required_members)
        for name, part in value.items():
            conforms(shape.members[name], part, f"{where}.{name}")
    elif shape.type_name in ("list", "map"):
        assert isinstance(value, list if shape.type_name == "list" else dict), where
        for part in value if isinstance(value, list) else value.values():
            conforms(shape.member if shape.type_name == "list" else shape.value, part, where)
    else:
        kinds = {"string": str, "integer": int, "long": int, "boolean": bool}
        assert type(value) is kinds[shape.type_name], (where, value)
        assert value in (getattr(shape, "enum", None) or [value]), (where, value)


def test_images_are_those_that_docker_takes():
    tagged = ("localhost:5000/x", "host:5000/me/x:1", "123456789012.dkr.ecr.us-east-1.amazonaws.com/cleanrl:V1", IMAGE)
    for good in ("x", "me/cleanrl:1.0", "GHCR.io/me/x", "a__b-c.d/e", *tagged):
        assert re.fullmatch(spec.IMAGE, good), good
    for bad in ("ghcr.io/Me/x", "x:", "x:1:2", "/x", "me//x", "x:-1", "x@sha256:12", "https://x/y", "größe", "x y"):
        assert not re.fullmatch(spec.IMAGE, bad), bad


def test_a_key_with_quotes_is_found(submit, monkeypatch):
    """JSON, YAML and a shell write such a value otherwise."""
    monkeypatch.setenv("DATABASE_PASSWORD", 'it\'s "long" \\ ünd so\ton')
    value = shlex.quote(os.environ["DATABASE_PASSWORD"])
    for provider in ("aws", "kubernetes", "slurm", "docker", "local"):
        line = ["--provider", provider, "--command", f"{COMMAND} --exp-name {value}", "--dry-run"]
        line += ["--docker-tag", "x"] if provider in submit_exp.IMAGES else []
        done = submit(*line, *(["--job-queue", "q"] if provider == "aws" else []))
        assert done.code == 2 and "the value of DATABASE_PASSWORD is in what would be sent" in done.err, provider


def test_batch_requests_have_the_api_s_shape():
    import botocore.session

    model = botocore.session.get_session().get_service_model("batch")
    words = ["--wandb-secret", ARN, "--execution-role-arn", ROLE, "--num-hours", 2, "--checkpoint-dir", "s3://b"]
    for more in ([], ["--num-nodes", 2, "--num-gpu", 8], ["--spot"]):
        (document,) = rendered("aws", *words, "--num-retries", 3, *more)
        conforms(model.operation_model("RegisterJobDefinition").input_shape, document["definition"])
        conforms(model.operation_model("SubmitJob").input_shape, document["job"])
        for name in (document["job"]["jobName"], document["job"]["jobDefinition"]):
            assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", name)
    with pytest.raises(AssertionError):
        bad = {**document["job"], "retryStrategy": {"evaluateOnExit": [{"action": "AGAIN"}]}}
        conforms(model.operation_model("SubmitJob").input_shape, bad)


def test_batch_one_node():
    words = ("--num-gpu", 1, "--num-hours", 0.5, "--num-retries", 3, "--checkpoint-dir", "s3://b", "--spot")
    (document,) = rendered("aws", *words, "--env", "WANDB_MODE=offline", command=f"{COMMAND} --track")
    container, job = document["definition"]["containerProperties"], document["job"]
    assert container["resourceRequirements"] == [
        *({"type": "VCPU", "value": "4"}, {"type": "MEMORY", "value": "8000"}, {"type": "GPU", "value": "1"})
    ]
    assert container["linuxParameters"] == {"sharedMemorySize": 1024} and "command" not in container
    assert job["retryStrategy"] == {
        "attempts": 3,
        "evaluateOnExit": [
            {"onStatusReason": "Host EC2*", "action": "RETRY"},
            {"onExitCode": "75", "action": "RETRY"},
            {"onReason": "*", "action": "EXIT"},
        ],
    }
    assert job["timeout"] == {"attemptDurationSeconds": 1800}
    name = "ppo_atari_multigpu__1__0a1b2c3d"
    environment = {each["name"]: each["value"] for each in job["containerOverrides"]["environment"]}
    assert environment == {"WANDB_RUN_ID": name, "WANDB_MODE": "offline"}, "one W&B run for all attempts"
    assert job["containerOverrides"]["command"][-5:] == ["--run-name", name, "--resume", "--checkpoint-dir", "s3://b"]
    assert "GPU" not in str(rendered("aws"))


def test_batch_several_nodes():
    (document,) = rendered("aws", "--num-nodes", 4, "--num-gpu", 8)
    nodes = document["definition"]["nodeProperties"]
    assert document["definition"]["type"] == "multinode" and (nodes["numNodes"], nodes["mainNode"]) == (4, 0)
    (part,) = nodes["nodeRangeProperties"]
    (override,) = document["job"]["nodeOverrides"]["nodePropertyOverrides"]
    assert part["targetNodes"] == override["targetNodes"] == "0:"
    command = override["containerOverrides"]["command"]
    assert command[:5] == ["python", "-m", "cleanrl_utils.launch", "--nproc_per_node=8", "ppo_atari_multigpu.py"]


def test_a_definition_s_name_is_its_content():
    one, other = (job["definition"] for job in rendered("aws", "--num-seed", 2))
    assert one == other
    names = {rendered("aws", *words)[0]["job"]["jobDefinition"] for words in ([], ["--num-gpu", 1], ["--shm-size", 9])}
    assert len(names) == 3 and all(name.startswith("cleanrl-ghcr-io-me-cleanrl-1-0-") for name in names)


def test_kubernetes_one_node():
    words = ("--num-gpu", 2, "--wandb-secret", "wandb/api-key", "--checkpoint-dir", "pvc:runs", "--num-retries", 3)
    ((job,),) = rendered("kubernetes", *words, "--spot", "--node-selector", "cloud.google.com/gke-spot=true")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    secret = {"name": "wandb", "key": "api-key"}
    assert container["env"] == [{"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": secret}}]
    assert container["resources"]["limits"] == {"memory": "16000Mi", "nvidia.com/gpu": "2"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"shm": "/dev/shm", "runs": "/train/runs"} and "--checkpoint-dir" not in container["command"]
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2048Mi"}
    assert pod["nodeSelector"] == {"cloud.google.com/gke-spot": "true"} and pod["restartPolicy"] == "Never"
    assert job["spec"]["backoffLimit"] == 2
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert rules[0] == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    assert rules[1] == {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}}
    assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_kubernetes_puts_nothing_in_place_of_a_dollar():
    for kind in ("job", "jobset", "trainjob"):
        words = ("--kubernetes-kind", kind, "--env", "NOTE=$(HOME) $$")
        ((job,),) = rendered("kubernetes", *words, command=f"{COMMAND} --exp-name x$$")
        text = json.dumps(job)
        assert '"$$(HOME) $$$$"' in text and '"x$$$$"' in text, kind


def test_kubernetes_several_nodes_find_the_first():
    ((service, job),) = rendered("kubernetes", "--num-nodes", 3, "--num-gpu", 1)
    name = job["metadata"]["name"]
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == name
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    (container,) = job["spec"]["template"]["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]} | {"JOB_COMPLETION_INDEX": "2"}
    assert launch.nodes(env) == [
        *("--nnodes=3", "--node_rank=2", f"--master_addr={name}-0.{name}", "--master_port=29400")
    ]
    ((jobset,),) = rendered("kubernetes", "--num-nodes", 3, "--kubernetes-kind", "jobset")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    env = replicated["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"} in env
    ((trainjob,),) = rendered("kubernetes", "--num-nodes", 3, "--kubernetes-kind", "trainjob")
    assert trainjob["spec"]["trainer"]["numNodes"] == 3 and trainjob["spec"]["trainer"]["env"] == []


def test_names_fit_every_provider():
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", specs("local", command=f"{COMMAND} --exp-name .größe")[0].name)
    long = "python ppo_atari_multigpu.py --exp-name " + "An_experiment.with-a_long/name" * 8
    names = set()
    for job in specs(
        "kubernetes", "--num-seed", 3, "--env-ids", "ALE/Breakout-v5", "BreakoutNoFrameskip-v4", command=long
    ):
        name = kubernetes.object_name(job)
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(f"{name}-node-0-999-abcde") <= 63
        assert re.fullmatch(r"[\w.-]{1,100}", job.name)
        assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*", spec.short_name(job.name, 63))
        names.add(name)
    assert len(names) == 6


def test_slurm_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.py").write_text("")
    (tmp_path / "key").write_text("x")
    (tmp_path / "key").chmod(0o600)
    words = ["--num-nodes", 2, "--num-gpu", 4, "--num-hours", 1.5, "--num-retries", 3, "--checkpoint-dir", "kept"]
    words += ["--wandb-secret", tmp_path / "key", "--job-queue", "gpu", "--env", "NOTE=it's"]
    (script,) = rendered("slurm", *words, command="python 'a b.py' --exp-name 'x y'")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    lines = script.splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert {"--partition=gpu", "--time=90:00", "--gres=gpu:4", "--nodes=2", "--ntasks-per-node=1", "--requeue"} < set(
        options
    )
    assert {"--cpus-per-task=16", "--mem=32000M", "--signal=B:USR1@300"} < set(options)
    assert "export NOTE='it'\"'\"'s'" in lines
    (srun,) = (shlex.split(line) for line in lines if line.startswith("srun "))
    launched = srun[srun.index(sys.executable) : -1]
    assert launched[1:6] == ["-m", "cleanrl_utils.launch", "--nproc_per_node=4", "a b.py", "--exp-name"]
    assert launched[-2:] == ["--checkpoint-dir", str(tmp_path / "kept")]


def run_batch_script(tmp_path, script, code, restarts, state):
    """The script under bash, with stand-ins for SLURM's commands; what it told scontrol, and the code that it kept."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, body in (
        ("srun", f"exit {code}"),
        ("squeue", f"echo {state}"),
        ("scontrol", f'echo "$@" > {tmp_path}/told; exit 1'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    (tmp_path / "told").unlink(missing_ok=True)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    assert subprocess.run(["bash"], input=script, text=True, env=env).returncode == code
    return (tmp_path / "told").read_text().strip() if (tmp_path / "told").exists() else None


def test_slurm_requeues_what_was_preempted_until_its_attempts_are_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    (job,) = specs("slurm", "--num-retries", 3, "--checkpoint-dir", "kept", command="python a.py")
    os.makedirs(os.path.dirname(job.logs))
    script = slurm.render(job)
    for code, restarts, state, told in (
        (75, 0, "RUNNING", "requeue 7"),
        (75, 1, "RUNNING", "requeue 7"),
        (75, 2, "RUNNING", None),
        (75, 0, "COMPLETING", None),  # cancelled, or requeued by SLURM
        (2, 0, "RUNNING", None),
        (0, 0, "RUNNING", None),
    ):
        assert run_batch_script(tmp_path, script, code, restarts, state) == told
        assert spec.read_exit(job.logs) == code


def test_docker_takes_the_key_by_name_and_keeps_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    one, two = rendered("docker", "--num-gpu", 2, "--num-seed", 2, "--wandb-secret", "env", "--checkpoint-dir", "kept")
    words = one["argv"]
    image = words.index(IMAGE)
    pairs = list(itertools.pairwise(words))
    assert (
        words[:3] == ["docker", "run", "--rm"]
        and ("--shm-size", "2048m") in pairs
        and ("--env", "WANDB_API_KEY") in pairs
    )
    assert ("--user", f"{os.getuid()}:{os.getgid()}") in pairs and ("--volume", f"{tmp_path}/kept:/train/runs") in pairs
    assert ("--gpus", '"device=0,1"') in pairs and '"device=2,3"' in two["argv"]
    assert words[image + 1 : image + 6] == [
        "python",
        "-m",
        "cleanrl_utils.launch",
        "--standalone",
        "--nproc_per_node=2",
    ]
    assert "--cpus" not in words and "--checkpoint-dir" not in words
    shares = [",".join(map(str, cores)) for cores in runs.deal(runs.cores(), 2)]
    assert [each["argv"][each["argv"].index("--cpuset-cpus") + 1] for each in (one, two)] == shares
    (job,) = rendered("docker", "--num-vcpu", 1)
    assert ("--cpuset-cpus", str(runs.cores()[0])) in itertools.pairwise(job["argv"])
    monkeypatch.setattr(runs, "cores", list)  # a Mac
    (job,) = rendered("docker", "--num-vcpu", 3)
    assert ("--cpus", "3") in itertools.pairwise(job["argv"]) and "--cpuset-cpus" not in job["argv"]


def test_the_image_is_built_and_pushed_first(submit, tmp_path, monkeypatch):
    base = ["--provider", "docker", "--docker-tag", "me/x:1", "--command", COMMAND, "--dry-run", "--build", "--push"]
    done = submit(*base)
    assert done.out.splitlines()[:2] == ["docker build -t me/x:1 .", "docker push me/x:1"]
    done = submit(*base, "--archs", "linux/amd64,linux/arm64")
    assert done.out.startswith("docker buildx build --platform linux/amd64,linux/arm64 -t me/x:1 --push .")
    (tmp_path / "docker").write_text('#!/bin/sh\n[ "$1" != push ]\n')
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    base.remove("--dry-run")
    done = submit(*base)
    assert done.code == 1 and done.err == "error: docker push me/x:1: exit code 1; nothing was sent\n"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    done = submit(*base)
    assert done.code == 1 and done.err == "error: docker is not installed here\n" and done.records == []


# --- the launcher -----------------------------------------------------------------------------------------------------


def test_the_launcher_reads_each_scheduler_s_nodes(tmp_path, monkeypatch, capsys):
    batch = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
    address = {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7"}
    main, child = ({**batch, "AWS_BATCH_JOB_NODE_INDEX": "0"}, {**batch, **address, "AWS_BATCH_JOB_NODE_INDEX": "1"})
    port = ["--master_port=29400"]
    assert launch.nodes(main) == ["--nnodes=2", "--node_rank=0", "--master_addr=127.0.0.1", *port]
    assert launch.nodes(child) == ["--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.7", *port]

    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[3-4]" ] && printf "gpu3\\ngpu4\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[3-4]"}
    step |= {"SLURM_NODEID": "1", "SLURM_JOB_ID": "123456"}
    assert launch.nodes(step) == ["--nnodes=2", "--node_rank=1", "--master_addr=gpu3", "--master_port=23456"]
    with pytest.raises(SystemExit) as left:
        launch.nodes({**step, "SLURM_STEP_NUM_TASKS": "16"})
    assert left.value.code == 2 and "use --ntasks-per-node=1" in capsys.readouterr().err

    kubeflow = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "3"}
    assert launch.nodes(kubeflow) == [
        "--nnodes=2",
        "--node_rank=1",
        "--master_addr=job-node-0-0.job",
        "--master_port=3",
    ]
    with pytest.raises(SystemExit) as left:
        launch.nodes({"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "0"})
    assert left.value.code == 2
    one = {"AWS_BATCH_JOB_NUM_NODES": "1", "SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1", "PET_NNODES": "1:4"}
    assert launch.nodes({}) == launch.nodes(one) == []


def test_the_nodes_reach_torchrun_unless_the_options_name_them(monkeypatch):
    for name, value in {"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1", "PET_MASTER_ADDR": "a-0.a"}.items():
        monkeypatch.setenv(name, value)
    line, _ = launch.command(["--nproc_per_node=2", "a.py", "--nnodes"])
    assert line[5:] == [
        *("--nnodes=2", "--node_rank=1", "--master_addr=a-0.a", "--master_port=29400", "--nproc_per_node=2"),
        *("a.py", "--nnodes"),
    ]
    assert "--node_rank=1" in launch.command(["a.py"])[0]
    for own in ("--standalone", "--nnodes=1", "--node-rank=0", "--master_addr=x", "--rdzv_backend=c10d"):
        assert launch.command([own, "a.py"])[0][5:] == [own, "a.py"]


# --- sent for real: this machine --------------------------------------------------------------------------------------


def test_local_jobs_run_fail_and_are_cancelled(submit, tmp_path):
    (tmp_path / "fine.py").write_text(
        "import os, sys\nassert os.environ['NOTE'] == 'a b' and sys.argv[1] == 'x y'\n"
        "print('step 64/128  SPS 1  left 0:00:01  mean return 2.5', file=sys.stderr)\n"
    )
    (tmp_path / "mixed.py").write_text("import sys\nprint('[red]seed', sys.argv[2])\nsys.exit(3 * ('2' in sys.argv))\n")
    (tmp_path / "long.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(100)\n")
    done = submit("--provider", "local", "--command", "python fine.py 'x y'", "--env", "NOTE=a b", "--watch")
    assert done.code == 0 and "succeeded" in done.out and "64 of 128" in done.out and "2.5" in done.out

    done = submit("--provider", "local", "--command", "python mixed.py", "--num-seed", 2, "--watch")
    assert done.code == 1 and "exit code 3" in done.out
    assert done.out.count("the end of its log") == 1 and "[red]seed 2" in done.out and "[red]seed 1" not in done.out

    sent = submit("--provider", "local", "--command", "python long.py")
    (record,) = [each for each in sent.records if each["submission"].startswith("long-")]
    (job,) = record["jobs"]
    log = tmp_path / "submissions" / record["submission"] / f"{job['name']}.log"
    wait_until(lambda: "begun" in log.read_text(), PATIENCE, "it runs")
    assert local.status(job["handle"]).state == "running"
    assert submit("status", record["submission"]).code == 1
    assert "told to end" in submit("cancel", record["submission"]).out
    watched = submit("watch", f"submissions/{record['submission']}.json")
    assert watched.code == 1 and "cancelled" in watched.out
    wait_until(lambda: local.started(job["handle"]["pid"]) is None, 30, "its shell, which has kept its code, ends")
    assert "cancelled" in submit("cancel", record["submission"]).out
    assert job["argv"] == [
        sys.executable,
        "-m",
        "cleanrl_utils.launch",
        "long.py",
        "--seed",
        "1",
        "--run-name",
        job["name"],
        "--resume",
    ]


def test_what_has_failed_is_retried_as_the_same_run(submit, tmp_path):
    source = "import os, sys\nprint('run', sys.argv[4])\nsys.exit(os.path.exists('broken') and '2' in sys.argv)\n"
    (tmp_path / "a.py").write_text(source)
    (tmp_path / "broken").write_text("")
    (record,) = submit("--provider", "local", "--command", "python a.py", "--num-seed", 2, "--watch").records
    fine, failed = record["jobs"]
    (tmp_path / "broken").unlink()
    done = submit("retry", record["submission"])
    assert done.code == 0 and f"sent {failed['name']}" in done.out and fine["name"] not in done.out
    assert submit("watch", record["submission"]).code == 0
    assert done.records[0]["jobs"][1]["earlier_handles"] == [failed["handle"]]
    assert runs.tail(failed["handle"]["log"]) == "\n".join([f"run {failed['name']}"] * 2)


@pytest.mark.slow
def test_a_cancelled_run_is_continued_to_the_same_weights(submit, tmp_path):
    """Real training on two processes, cancelled and retried, is the run that was left alone."""
    shutil.copy(ROOT / MULTI, tmp_path)
    words = "--total-num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2 --num-threads 1"
    words += " --checkpoint-every 1 --total-timesteps 2560"
    (record,) = submit("--provider", "local", "--command", f"python {MULTI} {words}", "--num-processes", 2).records
    handle = record["jobs"][0]["handle"]
    wait_until(lambda: "checkpoint: " in runs.tail(handle["log"]), PATIENCE, "it trains")
    submit("cancel", record["submission"])
    wait_until(lambda: local.status(handle).state != "running", 60, "it ends")
    assert local.status(handle) == Status("failed", reason="exit code 75")
    assert "stopped after iteration" in runs.tail(handle["log"])
    assert submit("retry", record["submission"]).code == 0
    assert submit("watch", record["submission"]).code == 0
    alone = Folder(tmp_path).run(command(MULTI, *words.split(), nproc=2))
    assert final(runs.tail(handle["log"])) == final(alone.stdout)


def test_a_pid_that_was_given_away_is_not_the_job(tmp_path):
    handle = {"pid": os.getpid(), "started": 1, "log": str(tmp_path / "x.log")}
    assert local.status(handle) == Status("failed", reason="gone without an exit code")
    local.cancel(handle)  # does not end this process


def test_the_same_submission_sends_what_is_missing(submit, tmp_path, monkeypatch):
    (tmp_path / "fine.py").write_text("print('fine')\n")
    words = ["--provider", "local", "--command", "python fine.py", "--num-seed", 3]
    real, sent = local.send, []

    def failing(job, document):
        if job.seed == 2 and not sent[2:]:
            sent.append("failed")
            raise Fault("no more processes")
        sent.append(job.seed)
        return real(job, document)

    monkeypatch.setattr(local, "send", failing)
    first = submit(*words)
    (record,) = first.records
    assert first.code == 1 and [job["handle"] is not None for job in record["jobs"]] == [True, False, False]
    assert "error: fine__2__" in first.err and "no more processes" in first.err and "sent 1 of 3" in first.err
    assert f"cancel {record['submission']}" in first.err and "the same command sends what is missing" in first.err
    sent.append("again")
    second = submit(*words)
    assert second.code == 0 and sent == [1, "failed", "again", 2, 3]
    (record,) = second.records
    assert [job["seed"] for job in record["jobs"]] == [1, 2, 3] and len({job["name"] for job in record["jobs"]}) == 3
    third = submit(*words)
    assert third.code == 0 and "sent before" in third.out and len(sent) == 5
    assert submit(*words, "--again").code == 0 and len(sent) == 8
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert all(submit("watch", each["submission"]).code == 0 for each in submit("status", record["submission"]).records)


def test_jobs_share_the_machine_and_more_than_it_has_gpus_are_refused(submit, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: X'; echo 'GPU 1: X'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    source = "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'], *sorted(os.sched_getaffinity(0)))\n"
    (tmp_path / "a.py").write_text(source)
    words = ["--provider", "local", "--command", "python a.py", "--num-gpu", 1]
    done = submit(*words, "--num-seed", 3)
    assert done.code == 1 and "3 job(s) take 3 GPU(s), this machine has 2" in done.err and done.records == []
    (record,) = submit(*words, "--num-seed", 2, "--watch").records
    logs = [runs.tail(job["handle"]["log"]) for job in record["jobs"]]
    assert logs == [" ".join(map(str, [i, *cores])) for i, cores in enumerate(runs.deal(runs.cores(), 2))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert "this machine has 1" in submit(*words, "--num-seed", 2, "--again").err
    assert "CUDA_VISIBLE_DEVICES=5 " in submit(*words, "--dry-run").out


# --- moto's Batch -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moto():
    """A Batch with an on-demand and a Spot queue; `requests` are all that it was asked."""
    import boto3
    from moto import mock_aws

    requests = []

    def note(params, model, **_):
        requests.append((model.name, json.loads(json.dumps(params))))
        conforms(model.input_shape, params)

    with pytest.MonkeyPatch.context() as patch, mock_aws(config={"batch": {"use_docker": False}}):
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        iam, ec2, client = boto3.client("iam"), boto3.client("ec2"), boto3.client("batch")
        role = iam.create_role(RoleName="r", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
        profile = iam.create_instance_profile(InstanceProfileName="p")["InstanceProfile"]["Arn"]
        iam.add_role_to_instance_profile(InstanceProfileName="p", RoleName="r")
        subnets = [ec2.describe_subnets()["Subnets"][0]["SubnetId"]]
        groups = [ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]]
        for name, kind in (("gpus", "EC2"), ("spot", "SPOT")):
            resources = {"type": kind, "minvCpus": 0, "maxvCpus": 8, "instanceTypes": ["g4dn.xlarge"]}
            resources |= {"subnets": subnets, "securityGroupIds": groups, "instanceRole": profile}
            client.create_compute_environment(
                computeEnvironmentName=name,
                type="MANAGED",
                state="ENABLED",
                serviceRole=role,
                computeResources=resources,
            )
            order = [{"order": 1, "computeEnvironment": name}]
            client.create_job_queue(jobQueueName=name, state="ENABLED", priority=1, computeEnvironmentOrder=order)
        boto3.setup_default_session()
        boto3.DEFAULT_SESSION.events.register("provide-client-params.batch.*", note)
        yield SimpleNamespace(client=client, requests=requests)
        boto3.DEFAULT_SESSION = None


@pytest.fixture
def batch(moto, monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for definition in active(moto):
        moto.client.deregister_job_definition(jobDefinition=definition["jobDefinitionArn"])
    moto.requests.clear()
    return moto


def active(batch):
    return batch.client.describe_job_definitions(status="ACTIVE")["jobDefinitions"]


AWS = ["--provider", "aws", "--docker-tag", IMAGE, "--command", COMMAND]


def names(batch, operation):
    return [params for name, params in batch.requests if name == operation]


def test_batch_jobs_are_sent_with_one_definition(submit, batch):
    done = submit(*AWS, "--job-queue", "gpus", "--env-ids", "Pong", "Qbert", "--num-seed", 2)
    assert done.code == 0, done.err
    (record,) = done.records
    assert len(names(batch, "SubmitJob")) == 4 and len(names(batch, "RegisterJobDefinition")) == 1
    (definition,) = active(batch)
    assert [definition["jobDefinitionName"]] == [names(batch, "RegisterJobDefinition")[0]["jobDefinitionName"]]
    assert {params["jobDefinition"] for params in names(batch, "SubmitJob")} == {definition["jobDefinitionArn"]}
    assert record["image_digest"] == "sha256:" + "0" * 64 and len(record["jobs"]) == 4
    found = batch.client.describe_jobs(jobs=[job["handle"]["job_id"] for job in record["jobs"]])["jobs"]
    assert {job["jobName"] for job in found} == {job["name"] for job in record["jobs"]}
    submit(*AWS, "--job-queue", "gpus", "--again")
    assert len(names(batch, "RegisterJobDefinition")) == 1
    watched = submit("watch", record["submission"])  # moto ends a job at the third question
    assert watched.code == 0 and watched.out.count("succeeded") >= 4


def test_batch_several_nodes_are_sent(submit, batch):
    assert submit(*AWS, "--job-queue", "gpus", "--num-nodes", 2, "--num-gpu", 8).code == 0
    (definition,), (job,) = names(batch, "RegisterJobDefinition"), names(batch, "SubmitJob")
    assert definition["type"] == "multinode" and definition["nodeProperties"]["numNodes"] == 2
    assert job["jobDefinition"] == active(batch)[0]["jobDefinitionArn"]


def test_batch_queues_that_cannot_run_the_jobs(submit, batch, monkeypatch):
    kept = ["--checkpoint-dir", "s3://b"]
    for words, error in (
        (["--job-queue", "nope"], "--job-queue nope: there is no such queue in us-east-1"),
        (["--job-queue", "gpus", "--spot", *kept], "--spot: the machines of --job-queue gpus are EC2, not SPOT"),
        (["--job-queue", "spot", "--num-nodes", 2], "--num-nodes 2: needs on-demand machines; those of spot are SPOT"),
    ):
        done = submit(*AWS, *words)
        assert done.code == 1 and error in done.err and done.records == [], done.err
    (queue,) = batch.client.describe_job_queues(jobQueues=["gpus"])["jobQueues"]
    (machines,) = batch.client.describe_compute_environments(computeEnvironments=["gpus"])["computeEnvironments"]
    for operation, answer, error in (
        ("describe_job_queues", {"jobQueues": [{**queue, "status": "INVALID"}]}, "the queue is INVALID"),
        ("describe_compute_environments", {"computeEnvironments": [{**machines, "state": "DISABLED"}]}, "no machine"),
    ):
        told = {
            "describe_job_queues": {"jobQueues": [queue]},
            "describe_compute_environments": {"computeEnvironments": [machines]},
            operation: answer,
        }
        client = SimpleNamespace(**{name: lambda a=a, **_: a for name, a in told.items()})
        with monkeypatch.context() as patch:
            patch.setattr(aws, "client", lambda *_, c=client: contextlib.nullcontext(c))
            done = submit(*AWS, "--job-queue", "gpus")
        assert done.code == 1 and error in done.err and done.records == [], done.err
    assert not names(batch, "SubmitJob") and not names(batch, "RegisterJobDefinition")
    assert submit(*AWS, "--job-queue", "spot", "--spot", *kept).code == 0


def test_a_failure_half_way_leaves_no_definition_and_is_continued(submit, batch, monkeypatch):
    import botocore.client

    real, limit = botocore.client.BaseClient._make_api_call, [0]

    def throttled(self, operation, params):
        if operation == "SubmitJob" and len(names(batch, "SubmitJob")) >= limit[0]:
            error = {"Error": {"Code": "TooManyRequestsException", "Message": "slow down"}}
            raise botocore.client.ClientError(error, operation)
        return real(self, operation, params)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", throttled)
    words = [*AWS, "--job-queue", "gpus", "--num-seed", 3]
    first = submit(*words)
    assert first.code == 1 and "slow down" in first.err and "sent 0 of 3" in first.err
    assert active(batch) == []
    limit[0] = 2
    second = submit(*words)
    assert second.code == 1 and "sent 2 of 3" in second.err
    limit[0] = 9
    third = submit(*words)
    assert third.code == 0 and len(names(batch, "SubmitJob")) == 3
    (record,) = third.records
    assert [params["jobName"] for params in names(batch, "SubmitJob")] == [job["name"] for job in record["jobs"]]
    monkeypatch.setattr(aws, "statuses", lambda handles: [Status("running")] * 2 + [Status("succeeded")])
    cancelled = submit("cancel", record["submission"])
    assert cancelled.code == 0 and cancelled.out.count("told to end") == 2 and cancelled.out.count("succeeded") == 1
    ids = [job["handle"]["job_id"] for job in record["jobs"]]
    assert [params["jobId"] for params in names(batch, "TerminateJob")] == ids[:2]


def test_no_credentials_are_one_line(submit, monkeypatch, tmp_path):
    import boto3

    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    done = submit(*AWS, "--job-queue", "gpus")
    assert done.code == 1 and "Unable to locate credentials" in done.err and done.err.count("\n") == 1


def test_the_log_of_a_batch_job(batch, monkeypatch):
    import boto3

    logs, where = boto3.client("logs"), {"logGroupName": "/g", "logStreamName": "cleanrl/default/1"}
    logs.create_log_group(logGroupName="/g")
    logs.create_log_stream(**where)
    now = int(time.time() * 1000)
    logs.put_log_events(**where, logEvents=[{"timestamp": now + i, "message": f"line {i}"} for i in range(300)])
    asked = []

    def describe(handle, ids):
        asked.extend(ids)
        return [{"container": {"logStreamName": where["logStreamName"]}}]

    monkeypatch.setattr(aws, "describe", describe)
    handle = {"job_id": "j", "num_nodes": 2, "region": "us-east-1", "log_group": "/g"}
    text = aws.log(handle)
    assert text.splitlines() == [f"line {i}" for i in range(100, 300)] and asked == ["j#0"], "the main node's end"
    monkeypatch.setattr(aws, "describe", lambda handle, ids: [{"container": {}}])
    assert aws.log(handle) == ""


def test_batch_statuses():
    running = {"status": "RUNNING", "attempts": [{}], "container": {}}
    assert aws.status(running) == Status("running", 2)
    assert aws.status({"status": "RUNNABLE"}) == Status("queued", 1, "runnable")
    failed = {"status": "FAILED", "attempts": [{}, {}], "container": {"exitCode": 2}, "statusReason": "Essential"}
    assert aws.status(failed) == Status("failed", 2, "exit code 2; Essential")
    assert aws.status(None).state == "unknown"


# --- commands that stand in for the clusters' clients -----------------------------------------------------------------

CLIENT = """#!/bin/sh
{ printf '%s\\n' "$0 $*"; case "$*" in *"-f -"*|--parsable*) cat;; esac; env; } >> "$NOTES"
case "$*" in
  *can-i*) echo yes;;
  --parsable*) echo 17;;
  *format=%R*) echo main;;
esac
"""


def test_slurm_gets_the_options_and_no_sizes_of_a_job_around_it(submit, clients, tmp_path, monkeypatch):
    """SBATCH_MEM_PER_NODE would overrule a line of the script, SLURM_MEM_PER_CPU would be srun's."""
    for name in ("SLURM_MEM_PER_CPU", "SLURM_JOB_ID", "SLURM_CONF", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "7")
    words = ["--provider", "slurm", "--command", COMMAND, "--dry-run", "--job-queue"]
    lines = [line for line in submit(*words, "main").out.splitlines() if line.startswith("#SBATCH")]
    words.remove("--dry-run")
    done = submit(*words, "nope,main")
    assert done.code == 1 and done.err == "error: --job-queue nope,main: no such partition; there are main\n"
    assert submit(*words, "main,main").code == 0
    (note,) = [n for n in re.split(r"(?m)^(?=\S+/clients/)", clients.read_text()) if "/clients/sbatch" in n]
    assert shlex.split(note.splitlines()[0])[1:3] == ["--parsable", "--partition=main,main"]
    assert len(shlex.split(note.splitlines()[0])) == 2 + len(lines) and "--mem=8000M" in note.splitlines()[0]
    assert "SLURM_CONF=7" in note and "SBATCH_ACCOUNT=7" in note
    assert "SLURM_MEM_PER_CPU" not in note and "SLURM_JOB_ID=7" not in note


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """kubectl, sbatch, sinfo and docker, that note their words, input and environment."""
    folder, notes = tmp_path / "clients", tmp_path / "notes"
    folder.mkdir()
    for name in ("kubectl", "sbatch", "sinfo", "docker"):
        (folder / name).write_text(CLIENT)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(notes))
    return notes


def test_the_key_is_nowhere(submit, clients, batch, tmp_path, monkeypatch):
    """In what is sent, printed and written by every provider. The client's environment has it, and Docker takes it."""
    import boto3

    sent = []
    boto3.DEFAULT_SESSION.events.register("before-send.*.*", lambda request, **_: sent.append(repr(vars(request))))
    (tmp_path / "a.py").write_text("import os\nprint(len(os.environ['WANDB_API_KEY']))\n")
    key_file = tmp_path / "key"
    key_file.write_text("the key of this file stays in it")
    key_file.chmod(0o600)
    printed = []
    for provider, secret, more in (
        ("aws", ARN, ["--execution-role-arn", ROLE, "--job-queue", "gpus", "--num-seed", 2]),
        ("kubernetes", "wandb/key", ["--num-nodes", 2]),
        ("kubernetes", "wandb/key", ["--kubernetes-kind", "jobset"]),
        ("kubernetes", "wandb/key", ["--kubernetes-kind", "trainjob"]),
        ("slurm", key_file, []),
        ("docker", "env", []),
        ("local", "env", []),
    ):
        words = ["--provider", provider, "--command", "python a.py --track", "--wandb-secret", secret, *more]
        words += ["--docker-tag", IMAGE] if provider in submit_exp.IMAGES else []
        for run in (submit(*words, "--dry-run"), submit(*words)):
            assert run.code == 0, run.err
            printed += [run.out, run.err]
    for record in run.records:
        for action in ("status", "cancel"):
            if record["provider"] in ("aws", "local", "docker"):
                if record["provider"] != "aws":
                    handle = record["jobs"][0]["handle"]
                    wait_until(lambda h=handle: local.status(h).state != "running", PATIENCE, "it ends")
                done = submit(action, record["submission"])
                printed += [done.out, done.err]
    assert len(sent) > 5 and len(run.records) == 7
    assert KEY not in "".join(printed) + "".join(sent)
    notes = clients.read_text()
    assert notes.count("clients/kubectl create") == 4 and notes.count("sbatch --parsable") == 1
    for note in re.split(r"(?m)^(?=\S+/clients/)", notes):
        environment_of_client = f"WANDB_API_KEY={KEY}\n"
        if "/clients/sbatch" in note:
            assert KEY not in note, "sbatch sends its environment"
        assert KEY not in note.replace(environment_of_client, "")
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != clients]
    assert len(written) > 10 and not [path for path in written if KEY.encode() in path.read_bytes()]
    lengths = [p.read_text() for p in written if p.suffix == ".log"]
    assert f"{len(KEY)}\n" in lengths, "the local job itself has it"


def test_kubernetes_objects_that_are_there_are_this_submission_s(submit, clients, tmp_path):
    done = submit("--provider", "kubernetes", "--docker-tag", IMAGE, "--command", COMMAND, "--num-nodes", 2)
    assert done.code == 0
    body = CLIENT + 'case "$*" in *create\\ -f*) echo "Error from server (AlreadyExists): x" >&2; exit 1;; esac\n'
    (tmp_path / "clients" / "kubectl").write_text(body)
    assert submit("--provider", "kubernetes", "--docker-tag", "x", "--command", COMMAND).code == 0
    (tmp_path / "clients" / "kubectl").write_text(body.replace("AlreadyExists", "Forbidden"))
    done = submit("--provider", "kubernetes", "--docker-tag", "y", "--command", COMMAND)
    assert done.code == 1 and "Forbidden" in done.err
    sent = [d for d in yaml.safe_load_all(kubernetes.show(rendered("kubernetes", "--num-nodes", 2)[0])) if d]
    assert [each["kind"] for each in sent] == ["Service", "Job"]


def test_bytes_of_a_log_that_are_no_text():
    assert spec.call(["printf", r"a\377b"]) == submit_exp.quiet("printf", r"a\377b") == "a\ufffdb"


def test_a_missing_extra_is_one_line_before_anything_is_sent(submit, monkeypatch, tmp_path):
    real = watch.importlib.util.find_spec
    for package, words in (
        ("yaml", ["kubernetes", "--docker-tag", "x", "--dry-run"]),
        ("rich", ["local", "--watch"]),
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, p=package: None if name == p else real(name))
        done = submit("--command", COMMAND, "--provider", *words)
        assert done.code == 2 and done.err.count("\n") == 1 and "pip install 'cleanrl-distributed[cloud]'" in done.err
    assert not (tmp_path / "submissions").exists()


def test_records_that_are_damaged_or_of_another_folder(submit, tmp_path, monkeypatch):
    (tmp_path / "fine.py").write_text("")
    (record,) = submit("--provider", "local", "--command", "python fine.py", "--watch").records
    path = tmp_path / "submissions" / f"{record['submission']}.json"
    for damage in ({"provider": "os"}, {"jobs": None}, {"jobs": [{"name": "x"}]}, {"jobs": [3]}):
        (tmp_path / "submissions" / "bad.json").write_text(json.dumps({**record, **damage}))
        done = submit("status", "bad")
        assert done.code == 2 and done.err.startswith("error: bad: not a submission of this folder ("), damage
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert submit("status", path).code == 0
    for action in ("cancel", "retry"):
        done = submit(action, path)
        assert done.code == 2 and "was sent from another folder; go there" in done.err
    assert os.listdir() == []


def test_a_client_that_is_missing_is_one_line(submit, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for provider, client in (("kubernetes", "kubectl"), ("slurm", "sinfo"), ("docker", "docker")):
        words = ["--docker-tag", "x"] if provider in submit_exp.IMAGES else []
        done = submit("--provider", provider, "--command", COMMAND, *words)
        assert done.code == 1 and done.err == f"error: {client} is not installed here\n"


# --- watching ---------------------------------------------------------------------------------------------------------


def test_watch_asks_again_shows_changes_and_ends(capfd):
    answers = [
        [Status("queued"), Status("running")],
        Fault("timeout"),
        [Status("running"), Status("running", 2)],
        [Status("succeeded"), Status("failed", 2, "exit code 1")],
    ]

    def statuses(handles):
        answer = answers.pop(0)
        if isinstance(answer, Fault):
            raise answer
        return answer

    logs = {"a": "step 1/10  SPS 3  left 0:00:03  mean return -", "b": "x\nTraceback"}
    provider = SimpleNamespace(statuses=statuses, log=lambda handle: logs[handle["id"]])
    jobs = [{"name": name, "handle": {"id": name}} for name in "ab"]
    record = {"submission": "s", "provider": "local", "jobs": [*jobs, {"name": "c", "handle": None}]}
    slept = []
    assert watch.follow(provider, record, sleep=slept.append) == 1
    out = capfd.readouterr().out
    assert len(slept) == 3 and "warning: timeout; asking again" in out
    assert out.index("a: queued") < out.index("a: running") < out.index("a: succeeded")
    assert "not sent" in out and out.rstrip().endswith("x\nTraceback") and "1 of 10" in out
    assert watch.exit_code({"a": Status("succeeded")}) == 0


def test_kubernetes_and_slurm_statuses(tmp_path):
    def item(**status):
        return {"status": status}

    done = item(conditions=[{"type": "Complete", "status": "True"}])
    assert kubernetes.status(done) == Status("succeeded")
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    assert kubernetes.status(item(conditions=[failed], restarts=2)) == Status("failed", 3, "BackoffLimitExceeded")
    assert kubernetes.status(item(ready=1)).state == "running" and kubernetes.status(item(active=1)).state == "queued"
    assert kubernetes.status(item(replicatedJobsStatus=[{"ready": 1}])).state == "running"
    assert kubernetes.status(None).state == "unknown"

    handle = {"job_id": "1", "log": str(tmp_path / "x.log")}
    assert slurm.status(handle, "PENDING", "1", "BeginTime") == Status("queued", 2, "BeginTime")
    assert slurm.status(handle, "CANCELLED", "0", "").state == "cancelled"
    assert slurm.status(handle, "NODE_FAIL", "0", "") == Status("failed", 1, "node_fail")
    assert slurm.status(handle, "", "0", "").state == "unknown"
    (tmp_path / "x.log.exit").write_text("0\n")
    assert slurm.status(handle, "", "0", "").state == slurm.status(handle, "COMPLETED", "0", "").state == "succeeded"


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_commands_of_the_page_are_valid(submit, tmp_path, monkeypatch):
    """Each is run with --dry-run, and the scripts are asked, in this process."""
    for name in (SINGLE, MULTI):
        shutil.copy(ROOT / name, tmp_path)
    asked = []

    def run(line, **options):
        asked.append(line[3])
        return SimpleNamespace(returncode=script.ask(line[3], json.loads(line[4])), stderr="")

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run, DEVNULL=None, TimeoutExpired=TimeoutError))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".wandb-key").write_text("x")
    (tmp_path / ".wandb-key").chmod(0o600)
    outputs = {**OUTPUTS, "job_queues": {"cleanrl-t4-spot": OUTPUTS["job_queues"]["t4-spot"]}}
    (tmp_path / "cloud.json").write_text(json.dumps({name: {"value": value} for name, value in outputs.items()}))
    page = (ROOT / "docs" / "submit_exp.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^ *python -m cleanrl_utils\.submit_exp (--.*)$", page, re.MULTILINE)
    assert {each.split()[1] for each in commands} == {"aws", "docker", "kubernetes", "local", "slurm"}
    for line in commands:
        done = submit(*shlex.split(os.path.expandvars(line)), "--dry-run")
        assert done.code == 0 and "nothing was sent" in done.err, (line, done.err)
    assert len(asked) == len(commands) and {*asked} == {SINGLE, MULTI}
