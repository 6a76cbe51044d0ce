"""Send a training script, once for each game and seed, to AWS Batch, Kubernetes, SLURM, Docker or this machine.

python -m cleanrl_utils.submit_exp --provider local --command "python ppo_atari.py" --num-seed 3 --dry-run
python -m cleanrl_utils.submit_exp status ID     # also: watch ID, cancel ID, retry ID
"""

import dataclasses
import hashlib
import importlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from cleanrl_utils import EXIT_INTERRUPTED
from cleanrl_utils.config import Fault, NonNegative, Positive, UsageError, flag_name, parse, require
from cleanrl_utils.runs import Place, experiment
from cleanrl_utils.submit import local, script, watch
from cleanrl_utils.submit import record as records
from cleanrl_utils.submit import spec as common
from cleanrl_utils.submit.spec import JobSpec

MACHINES = ("docker", "local")
IMAGES = ("aws", "kubernetes", "docker")
# Flags that only some providers know. The others refuse them: a flag is never accepted and ignored.
ONLY = {
    "docker_tag": IMAGES,
    "build": IMAGES,
    "push": IMAGES,
    "archs": IMAGES,
    "terraform_outputs": ("aws",),
    "execution_role_arn": ("aws",),
    "job_role_arn": ("aws",),
    "kubernetes_kind": ("kubernetes",),
    "namespace": ("kubernetes",),
    "service_account": ("kubernetes",),
    "node_selector": ("kubernetes",),
    "shm_size": IMAGES,
}
# MiB. The smallest run there is, one game on the CPU and batches of four steps, has 292 beside what it maps from files.
LEAST_MEMORY = 300
NOT_PART_OF_THE_REQUEST = ("dry_run", "watch", "again", "build", "push", "archs")


@dataclass(frozen=True)
class Args:
    """Send a training script, once for each game and seed. `status ID`, `watch ID`, `cancel ID` and `retry ID` act on a
    submission that was sent before. Sizes are of each node. Where no number is given, a process gets 4 CPUs, 8000 MiB
    of memory and of it 1024 MiB of shared memory, or its share of the queue's machine with --terraform-outputs."""

    provider: common.Provider
    """where the jobs run: AWS Batch, the cluster of kubectl, the cluster of sbatch, or this machine"""
    command: str
    """one run, such as "python ppo_atari_multigpu.py --track"; --seed, --run-name, --resume, --checkpoint-dir and the
    launcher are added"""
    env_ids: tuple[str, ...] = ()
    """games, each for every seed; else the game that the command names, or its default"""
    num_seed: Positive[int] = 1
    """number of seeds"""
    start_seed: NonNegative[int] = 1
    """the first seed"""
    docker_tag: str | None = None
    """the image (aws, kubernetes, docker); slurm and local run the python that submits"""
    build: bool = False
    """build the image first, from the Dockerfile of this folder"""
    push: bool = False
    """push the image first"""
    archs: str | None = None
    """with --build: platforms such as linux/amd64,linux/arm64 (docker buildx)"""
    job_queue: str | None = None
    """Batch queue, SLURM partition, or Kueue LocalQueue"""
    num_nodes: Positive[int] = 1
    """nodes of each job"""
    num_gpu: NonNegative[int] = 0
    """GPUs of each node; of this machine, each job takes its own"""
    num_processes: Positive[int] | None = None
    """processes of each node; one a GPU, or one, if not set"""
    num_vcpu: Positive[int] | None = None
    """CPUs of each node; 4 a process, or on this machine an equal share of its cores, if not set"""
    num_memory: Positive[int] | None = None
    """memory of each node in MiB; 8000 a process if not set (no limit on this machine)"""
    shm_size: Positive[int] | None = None
    """/dev/shm of each container in MiB, a part of its memory; 1024 a process if not set"""
    num_hours: Positive[float] | None = None
    """time limit in hours: of an attempt (aws, slurm), or of the job with its retries (kubernetes)"""
    num_retries: Annotated[Positive[int] | None, tyro.conf.arg(aliases=["--aws-num-retries"])] = None
    """attempts of each job in all, 1 to 10: after a lost machine or a preemption it continues from its checkpoint; 1,
    or 5 with --spot, if not set"""
    spot: bool = False
    """the machines may be taken away: on aws --job-queue must be a Spot queue, on kubernetes --node-selector names the
    machines"""
    checkpoint_dir: str | None = None
    """where checkpoints outlive the machine: s3://bucket/folder, on kubernetes also pvc:CLAIM, else a folder, which
    all nodes see"""
    env: tuple[str, ...] = ()
    """NAME=VALUE for the job's environment; nothing secret"""
    wandb_secret: str | None = None
    """where the job finds its W&B key: an ARN of Secrets Manager or SSM (aws), NAME/KEY of a Secret (kubernetes), a
    file (slurm), `env` for WANDB_API_KEY of this environment (docker, local)"""
    terraform_outputs: str | None = None
    """file of `terraform -chdir=cloud output -json`: roles, region, log group, secret, checkpoints and the queue's
    machine, where their flags are not set (aws)"""
    execution_role_arn: str | None = None
    """role that reads the secret and writes the log (aws)"""
    job_role_arn: str | None = None
    """role of the script, which reads and writes checkpoints (aws)"""
    kubernetes_kind: Literal["job", "jobset", "trainjob"] = "job"
    """an Indexed Job with a headless Service; or a JobSet, which restarts all nodes at once; or a Kubeflow TrainJob"""
    namespace: str | None = None
    """namespace; kubectl's own if not set (kubernetes)"""
    service_account: str | None = None
    """service account of the pods, for example with access to the checkpoints (kubernetes)"""
    node_selector: tuple[str, ...] = ()
    """LABEL=VALUE of the nodes to run on; taints of these labels are tolerated (kubernetes)"""
    dry_run: bool = False
    """print what would be sent and send nothing"""
    watch: bool = False
    """follow the jobs to their end; exit with 0 if all of them succeed"""
    again: bool = False
    """a new submission, although the same one was sent before"""


@dataclass(frozen=True)
class Earlier:
    """Act on a submission that was sent before."""

    submission: tyro.conf.Positional[str]
    """its id, or its file in submissions/"""


def provider_of(name: str) -> Any:
    """The module that knows a provider."""
    return importlib.import_module(f"cleanrl_utils.submit.{name}")


def read_outputs(path: str | None) -> dict[str, Any]:
    """The values of `terraform output -json`."""
    if path is None:
        return {}
    try:
        with open(path) as file:
            return {name: entry["value"] for name, entry in json.load(file).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"--terraform-outputs {path}: not the file of `terraform output -json`: {error!r}") from None


def sizes(args: Args, machine: dict[str, Any] | None) -> tuple[dict[str, int | None], int]:
    """num_vcpu, memory and shm_size of each node, and its processes. `machine`: the queue's, of Terraform's outputs."""
    processes = args.num_processes or max(1, args.num_gpu)
    rule = f"--num-processes {processes} would leave {args.num_gpu - processes} of them idle"
    require(args.num_gpu <= processes, "--num-gpu", args.num_gpu, rule)
    vcpu, memory = 4 * processes, 8000 * processes
    if machine is not None:
        gpus, queue = machine["gpus"], args.job_queue
        for flag, value, most in (
            ("--num-gpu", args.num_gpu, gpus),
            ("--num-vcpu", args.num_vcpu or 0, machine["vcpus"]),
            ("--num-memory", args.num_memory or 0, machine["memory_mib"]),
        ):
            require(value <= most, flag, value, f"a machine of {queue}, {machine['machine']}, has {most}")
        parts = gpus // args.num_gpu if args.num_gpu and args.num_nodes == 1 else 1
        vcpu, memory = machine["vcpus"] // parts, machine["memory_mib"] // parts
    memory = args.num_memory or memory
    rule = f"must be {LEAST_MEMORY} or more for each of {processes} process(es): PyTorch and one game take that"
    require(memory >= LEAST_MEMORY * processes or args.provider == "local", "--num-memory", memory, rule)
    shm_size = args.shm_size or min(1024 * processes, memory // 2)
    if args.provider in MACHINES:
        return {"num_vcpu": args.num_vcpu, "memory": args.num_memory, "shm_size": shm_size}, processes
    return {"num_vcpu": args.num_vcpu or vcpu, "memory": memory, "shm_size": shm_size}, processes


def check_flags(args: Args, words: list[str]) -> None:
    """Flags against each other, and against the words of the command."""
    for field in dataclasses.fields(Args):
        value, providers = getattr(args, field.name), ONLY.get(field.name, (args.provider,))
        rule = f"applies to --provider {' and '.join(providers)} only"
        require(value == field.default or args.provider in providers, flag_name(field.name), value, rule)
        given = value if isinstance(value, tuple) else (value,)
        require("" not in given, flag_name(field.name), "''", "must not be empty")  # of an unset variable of a shell
    for flag, size, most in (
        ("--num-gpu", args.num_gpu, 1000),
        ("--num-processes", args.num_processes, 1000),
        ("--num-vcpu", args.num_vcpu, 10**5),
        ("--num-memory", args.num_memory, 10**9),
        ("--shm-size", args.shm_size, 10**9),
    ):
        require((size or 0) <= most, flag, size, f"must be {most} or less")
    games = " ".join(args.env_ids)
    require(
        not games or common.flag_value(words, "--env-id") is None, "--env-ids", games, "the command has --env-id too"
    )
    require(len(set(args.env_ids)) == len(args.env_ids), "--env-ids", games, "names a game twice")
    require(args.archs is None or args.build, "--archs", args.archs, "needs --build")
    for flag in ("build", "push"):
        require(not getattr(args, flag) or bool(args.docker_tag), flag_name(flag), "", "needs --docker-tag")
    if args.provider not in IMAGES:
        require(os.path.isfile(words[1]), "--command", "", f"{words[1]} is not a file of this folder")


def make_specs(args: Args, submission: str) -> list[JobSpec]:
    """The jobs of the command line, checked: all of them are valid, or a usage error says why not."""
    words, env = common.split_command(args.command), common.check_env(args.env)
    check_flags(args, words)
    outputs, machine = read_outputs(args.terraform_outputs), None
    if args.terraform_outputs is not None:
        queues = outputs.get("job_queues")
        known = {"spot": bool, "gpus": int, "vcpus": int, "memory_mib": int, "machine": str}
        fine = isinstance(queues, dict) and all(
            isinstance(q, dict) and all(isinstance(q.get(name), kind) for name, kind in known.items())
            for q in queues.values()
        )
        rule = "has no job_queues as cloud/ makes them; was it applied?"
        require(bool(queues) and fine, "--terraform-outputs", args.terraform_outputs, rule)
        assert isinstance(queues, dict)
        require(args.job_queue in queues, "--job-queue", args.job_queue, f"must be one of {', '.join(queues)}")
        machine = queues[args.job_queue]
        require(machine["spot"] or not args.spot, "--spot", "", f"{args.job_queue} has on-demand machines")
    spot = args.spot or bool(machine and machine["spot"])
    size, num_processes = sizes(args, machine)
    alone = os.path.basename(words[1]) != "ppo_atari.py" or num_processes * args.num_nodes == 1
    require(alone, "--command", args.command, "ppo_atari.py is one process; use ppo_atari_multigpu.py")
    most = 2**31 - 1  # seconds, as schedulers count them
    require((args.num_hours or 0) * 3600 <= most, "--num-hours", args.num_hours, f"must be {most // 3600} or less")
    tracked = any(word.replace("_", "-") == "--track" for word in words)
    secret = args.wandb_secret or (outputs.get("wandb_secret_arn") if tracked else None)
    if tracked and args.provider in IMAGES and env.get("WANDB_MODE") not in ("offline", "dryrun", "disabled"):
        require(secret is not None, "--track", "", "needs --wandb-secret, or --env WANDB_MODE=offline")
    folder = args.checkpoint_dir or outputs.get("checkpoint_url")
    claim = folder is not None and folder.startswith("pvc:")
    require(not claim or args.provider == "kubernetes", "--checkpoint-dir", folder, "pvc: is of Kubernetes only")
    if folder is None or claim or (args.provider == "docker" and "://" not in folder):
        kept = []  # mounted where the script writes by itself
    else:
        kept = ["--checkpoint-dir", folder if "://" in folder else os.path.abspath(folder)]
    python = "python" if args.provider in IMAGES else sys.executable
    options = {name: getattr(args, name) for name in ("kubernetes_kind", "namespace", "service_account", "provider")}
    options |= {name: getattr(args, name) or outputs.get(name) for name in ("execution_role_arn", "job_role_arn")}
    options |= {name: outputs.get(name) for name in ("region", "log_group")}
    options |= {"node_selector": list(args.node_selector)}

    specs: list[JobSpec] = []
    num_jobs = max(1, len(args.env_ids)) * args.num_seed
    alone = "WANDB_RUN_ID" not in env or num_jobs == 1
    require(alone, "--env", "WANDB_RUN_ID", f"is one W&B run, and these are {num_jobs}, which get an id each")
    places = [Place()] * num_jobs
    if args.provider in MACHINES:
        places = local.places(num_jobs, args.num_gpu, args.num_vcpu)
    exp_name = common.flag_value(words, "--exp-name") or experiment(words)
    for env_id in args.env_ids or (None,):
        for seed in range(args.start_seed, args.start_seed + args.num_seed):
            game = env_id or common.flag_value(words, "--env-id")
            parts = [game, exp_name, str(seed), submission.rpartition("-")[2]]
            name = common.short_name("__".join(filter(None, parts)), 100, "A-Za-z0-9_.-")
            added = ["--env-id", env_id] if env_id else []
            added += ["--seed", str(seed), "--run-name", name, "--resume", *kept]
            own = {"WANDB_RUN_ID": common.short_name(name, 64)} if tracked else {}  # attempts are one W&B run
            specs.append(
                JobSpec(
                    name=name,
                    argv=tuple(common.launched(python, words, args.num_nodes, num_processes, added)),
                    submission=submission,
                    env_id=game,
                    seed=seed,
                    env={**own, **env},
                    image=args.docker_tag,
                    queue=args.job_queue,
                    num_nodes=args.num_nodes,
                    num_gpu=args.num_gpu,
                    place=places[len(specs)],
                    **size,
                    time_limit=None if args.num_hours is None else round(args.num_hours * 3600),
                    attempts=args.num_retries or (5 if spot and args.kubernetes_kind != "trainjob" else 1),
                    spot=spot,
                    secret=secret,
                    checkpoint_dir=folder,
                    options=options,
                )
            )
    provider = provider_of(args.provider)
    for spec in specs:
        common.check(spec)
        provider.check(spec)
    rendered = "".join(provider.show(provider.render(spec)) for spec in specs)
    common.check_secrets(rendered + json.dumps([dataclasses.asdict(spec) for spec in specs]), secret)
    return specs


def image_commands(args: Args) -> list[list[str]]:
    """What --build and --push run."""
    tag = str(args.docker_tag)
    if args.build and args.archs:
        out = "--push" if args.push else "--load"
        return [["docker", "buildx", "build", "--platform", args.archs, "-t", tag, out, "."]]
    build = [["docker", "build", "-t", tag, "."]] if args.build else []
    return build + ([["docker", "push", tag]] if args.push else [])


def make_image(args: Args) -> None:
    for line in image_commands(args):
        try:
            code = subprocess.run(line).returncode
        except FileNotFoundError:
            raise Fault(f"{line[0]} is not installed here; nothing was sent") from None
        if code:
            raise Fault(f"{shlex.join(line)}: exit code {code}; nothing was sent")


def quiet(*argv: str) -> str | None:
    """A command's output, or None where it can't be had."""
    try:
        done = subprocess.run(argv, check=True, capture_output=True, text=True, errors="replace", timeout=30)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def image_digest(tag: str | None) -> str | None:
    """The digest in the tag, or that of the image here."""
    if tag is None or "@" in tag:
        return tag and tag.partition("@")[2]
    return quiet("docker", "image", "inspect", "--format", "{{index .RepoDigests 0}}", tag)


def new_record(args: Args, argv: list[str], specs: list[JobSpec], request_hash: str) -> records.Record:
    changed = quiet("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "submission": specs[0].submission,
        "provider": args.provider,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command_line": argv,
        "request_hash": request_hash,
        "git_commit": quiet("git", "rev-parse", "HEAD"),
        "git_changed_files": changed.splitlines() if changed else [],
        "image": args.docker_tag,
        "image_digest": image_digest(args.docker_tag),
        "jobs": [
            {"name": spec.name, "env_id": spec.env_id, "seed": spec.seed, "argv": list(spec.argv), "handle": None}
            for spec in specs
        ],
    }


def submit(argv: list[str]) -> int:
    args: Args = parse(Args, argv)
    request = {k: v for k, v in dataclasses.asdict(args).items() if k not in NOT_PART_OF_THE_REQUEST}
    request_hash = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    submission = f"{common.short_name(experiment(common.split_command(args.command)), 50)}-{secrets.token_hex(4)}"
    specs = make_specs(args, submission)
    common.check_secrets(json.dumps(argv), args.wandb_secret)
    script.check(specs)
    if args.watch:
        watch.require_rich()
    provider = provider_of(args.provider)
    if args.dry_run:
        for line in image_commands(args):
            print(shlex.join(line))
        for spec in specs:
            print(provider.show(provider.render(spec)))
        print(f"dry run: {len(specs)} job(s) are valid, nothing was sent", file=sys.stderr)
        return 0
    with records.locked():
        record = None if args.again else records.find(request_hash)
        if record is None:
            provider.reach(specs)
            make_image(args)
            record = new_record(args, argv, specs, request_hash)
        else:
            specs = make_specs(args, record["submission"])
            if any(job["handle"] is None for job in record["jobs"]):
                provider.reach(specs)
        code = send(args, provider, specs, record)
    if code == 0 and args.watch:
        return watch.follow(provider, record)
    return code


def send(args: Args, provider: Any, specs: list[JobSpec], record: records.Record) -> int:
    """Send the jobs that were not sent yet, and keep the record of each."""
    tool = "python -m cleanrl_utils.submit_exp"
    before = sum(job["handle"] is not None for job in record["jobs"])
    if before == len(specs):
        print(f"sent before, on {record['time']}; --again sends a new submission, `retry` continues what has failed")
    records.save(record)
    for job, spec in zip(record["jobs"], specs, strict=True):
        if job["handle"] is not None:
            continue
        try:
            job["handle"] = provider.send(spec, provider.render(spec))
        except (Fault, UsageError, OSError) as error:
            sent = [job["name"] for job in record["jobs"] if job["handle"] is not None]
            missing = [job["name"] for job in record["jobs"] if job["handle"] is None]
            print(f"error: {spec.name} could not be sent: {error}", file=sys.stderr)
            print(f"sent {len(sent)} of {len(specs)}: {' '.join(sent) or 'none'}", file=sys.stderr)
            print(f"not sent: {' '.join(missing)}", file=sys.stderr)
            print("the same command sends what is missing", file=sys.stderr)
            if sent:
                print(f"{tool} cancel {record['submission']} ends what was sent", file=sys.stderr)
            return 1
        finally:
            records.save(record)
        print(f"sent {spec.name}")
    print(f"{len(specs)} job(s): {records.path(record['submission'])}; {tool} watch {record['submission']}")
    return 0


def cancel(provider: Any, record: records.Record) -> int:
    """End the jobs that have not ended."""
    found, code = watch.statuses(provider, record), 0
    for job in record["jobs"]:
        if job["handle"] is None or found[job["name"]].state in watch.ENDED:
            print(f"{job['name']}: {'not sent' if job['handle'] is None else found[job['name']].state}")
            continue
        try:
            provider.cancel(job["handle"])
        except Fault as fault:
            print(f"error: {job['name']}: {fault}", file=sys.stderr)
            code = 1
            continue
        job["cancelled"] = True
        records.save(record)
        print(f"{job['name']}: told to end")
    return code


def retry(provider: Any, record: records.Record) -> int:
    """Send again what has failed, was cancelled or is forgotten: it continues from its checkpoints."""
    args = parse(Args, record["command_line"])
    specs = make_specs(args, record["submission"])
    provider.reach(specs)
    with records.locked():
        found = watch.statuses(provider, record)
        for job in record["jobs"]:
            if job["handle"] is not None and found[job["name"]].state in ("failed", "cancelled", "unknown"):
                if args.provider == "kubernetes":
                    provider.cancel(job["handle"])  # the name is wanted again
                job.setdefault("earlier_handles", []).append(job["handle"])
                job["handle"] = None
                job.pop("cancelled", None)
        return send(args, provider, specs, record)


def main(argv: list[str]) -> int:
    earlier = argv[0] if argv and argv[0] in ("status", "watch", "cancel", "retry") else None
    try:
        for word in argv:
            flag = word.replace("_", "-").partition("=")[0]
            own = not flag.startswith("--") or flag == "--wandb-secret" or common.SECRET_NAME.search(flag) is None
            require(own, flag, "", "a key on a command line can be read by others; use --wandb-secret")
        if earlier is None:
            return submit(argv)
        given = parse(Earlier, argv[1:]).submission
        record = records.load(given)
        provider = provider_of(record["provider"])
        if earlier in ("cancel", "retry"):
            rule = "was sent from another folder; go there, where its record and its runs are"
            require(os.path.isfile(records.path(record["submission"])), earlier, given, rule)
            return (cancel if earlier == "cancel" else retry)(provider, record)
        return watch.follow(provider, record, once=earlier == "status")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Fault, OSError) as error:  # OSError: a folder or a disk that can't hold the record
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("the jobs go on", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
