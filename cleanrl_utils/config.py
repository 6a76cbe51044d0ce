"""The command line: the flags every script shares, number ranges, and errors of one line with exit code 2."""

import contextlib
import dataclasses
import importlib.util
import io
import math
import os
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import tyro


@dataclass(frozen=True)
class Range:
    """A rule for a number: it is finite and `test` holds. `says` completes "must be ..."."""

    says: str
    test: Callable[[float], bool]


T = TypeVar("T")
Positive = Annotated[T, Range("above 0", lambda x: x > 0)]
NonNegative = Annotated[T, Range("0 or above", lambda x: x >= 0)]
Fraction = Annotated[T, Range("between 0 and 1", lambda x: 0 <= x <= 1)]


@dataclass(frozen=True)
class RunArgs:
    """Flags that every script shares and nobody tweaks. A script's `Args` adds its algorithm."""

    exp_name: str | None = None
    """name of the experiment; the script's file name if not set"""
    run_name: str | None = None
    """name of the run, and of its folder in runs/ and videos/; {env_id}__{exp_name}__{seed}__{time} if not set"""
    seed: NonNegative[int] = 1
    """seed of the experiment: weights, noise, shuffles and every environment's seed follow from it"""
    torch_deterministic: bool = True
    """let cuDNN use deterministic algorithms only; --no-torch-deterministic lets it pick the fastest"""
    cuda: bool = True
    """use the GPU where there is one; --no-cuda stays on the CPU"""
    num_threads: Positive[int] | None = None
    """CPU threads of each process; its share of the machine's cores if not set (torchrun's OMP_NUM_THREADS=1
    counts as not set)"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: activations in bfloat16 (autocast), with fp32 weights, optimizer and losses; fast where the processor has
    bf16 units, and other numbers than fp32's"""
    compile: bool = False
    """torch.compile the network: a start that takes a minute longer; equal to the eager network within rounding"""
    vector_env: Literal["sync", "async"] = "sync"
    """sync: a process steps its environments one after the other; async: in worker processes, one for each core"""
    track: bool = False
    """send the metrics to Weights & Biases too (WANDB_MODE=offline writes them to wandb/)"""
    wandb_project_name: str = "cleanRL"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases entity (team)"""
    wandb_group: str | None = None
    """Weights & Biases group, for example of a configuration's seeds"""
    wandb_tags: tuple[str, ...] = ()
    """Weights & Biases tags: --wandb-tags one two"""
    capture_video: bool = False
    """record games 0, 1, 8, 27, ... of environment 0 to videos/ (needs the `video` extra)"""
    resume: bool = False
    """continue the run --run-name from its newest checkpoint, bit for bit, or start it where it has none"""
    init_from: str | None = None
    """start a new run with the weights of this checkpoint: a file, or a folder for its newest"""
    checkpoint_every: NonNegative[int] = 50
    """iterations between checkpoints of the whole job, of which the newest 3 are kept; 0: only when the run ends"""
    checkpoint_dir: str = "runs"
    """checkpoints are in {checkpoint_dir}/{run_name}/; a folder, or a URL such as s3://bucket/folder (`s3` extra)"""

    def require(self, field: str, holds: bool, rule: str) -> None:
        """Usage error naming the field's flag, its value and the rule, unless the rule holds."""
        require(holds, flag_name(field), getattr(self, field), rule)


class UsageError(Exception):
    """Something the user can put right on the command line. `run` prints it as one line and exits with 2."""


class Fault(Exception):
    """What no flag puts right. `run` prints it as one line and exits with 1. Raise it in all processes."""


class OwnFault(Fault):
    """A fault that only this process has met, and therefore prints itself, whatever its rank."""


def say(line: str, write: Callable[..., object] = print) -> None:
    """A line on stderr. Where it can't be written (a full disk, a `tee` that Ctrl-C has ended), the run goes on."""
    try:
        write(line, file=sys.stderr)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def flag_name(field: str) -> str:
    """The command line's name of a dataclass field."""
    return "--" + field.replace("_", "-")


def require(holds: bool, flag: str, value: object, rule: str) -> None:
    """Usage error naming the flag, the value and the rule, unless the rule holds."""
    if not holds:
        shown = str(value) if str(value).isprintable() else repr(value)  # one line
        raise UsageError(f"{flag} {shown}".rstrip() + f": {rule}")


def parse(args_class: type, argv: list[str]) -> Any:
    """`argv` as an instance of the dataclass; a usage error where tyro or a field's `Range` refuses it."""
    _refuse_flag_values(args_class, argv)
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            args: Any = tyro.cli(args_class, args=argv)
    except SystemExit as leave:
        if leave.code == 0:  # --help
            raise
        raise UsageError(_one_line(captured.getvalue())) from None
    for name, hint in typing.get_type_hints(args_class, include_extras=True).items():
        value = getattr(args, name)
        for rule in _ranges(hint):
            if value is not None:
                require(math.isfinite(value) and rule.test(value), flag_name(name), value, f"must be {rule.says}")
    return args


def _ranges(hint: Any) -> list[Range]:
    """The ranges in a field's annotation, also inside `... | None`."""
    own = [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Range)]
    return own + [rule for part in typing.get_args(hint) for rule in _ranges(part) if part is not hint]


def _refuse_flag_values(args_class: type, argv: list[str]) -> None:
    """`--track True` was right in older scripts: say what is right now. Of `--env A=1 --env B=2` only B would count."""
    booleans = {flag_name(f.name) for f in dataclasses.fields(args_class) if f.type is bool}
    lists = {flag_name(f.name) for f in dataclasses.fields(args_class) if typing.get_origin(f.type) is tuple}
    flags = [word.replace("_", "-").partition("=")[0] for word in argv]
    for flag, word, following in zip(flags, argv, [*argv[1:], ""], strict=False):
        value = word.partition("=")[2] or following
        if flag in booleans and ("=" in word or value.lower() in ("true", "false", "yes", "no", "1", "0")):
            raise UsageError(f"{flag} {value}: takes no value; write {flag} or --no-{flag[2:]}")
        require(flag not in lists or flags.count(flag) == 1, flag, "", f"is there twice; write {flag} ONE TWO")


def _one_line(box: str) -> str:
    """tyro's message, a box of sections (title, message, hints, ...), as a line without the help texts."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith("╰")]
    rules = [i for i, line in enumerate(lines) if line and not line.strip("─-")] + [len(lines)]
    start = 1 if box.startswith("╭") else rules.pop(0) + 1  # without UTF-8 a rule follows on the title, not a frame
    message, hints = " ".join(lines[start : rules[0]]).strip(), lines[rules[0] :]
    meant = hints if "Perhaps you meant:" in hints else []
    flags = [line for line in meant if line.startswith("--") and line.strip("-")]
    return f"{message}{'; perhaps you meant ' * bool(flags)}{' or '.join(flags)} (see --help)"


def check_run_args(args: RunArgs) -> None:
    """What the shared flags need, before anything is made."""
    named = not {"", ".", ".."} & set(str(args.run_name).split("/"))
    require(named, "--run-name", repr(args.run_name), "must be a name for a folder inside runs/")
    for flag, name in (("--run-name", args.run_name or ""), ("--exp-name", args.exp_name or "")):
        require(":" not in name, flag, repr(name), "must be without a colon, which URLs of checkpoints have")
        require(name.isprintable(), flag, ascii(name), "must be without line breaks and other control characters")
    require(args.run_name is not None or not args.resume, "--resume", "", "needs the --run-name of the run to continue")
    require(args.checkpoint_dir != "", "--checkpoint-dir", "''", "must be a folder or a URL")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0":
        rule = "needs --run-name, by which restarted processes find their run"
        require(args.run_name is not None, "--max-restarts", restarts, rule)
        rule = "needs --standalone, or --rdzv-backend=c10d and --rdzv-id: static rendezvous can't restart"
        require(os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none", "--max-restarts", restarts, rule)
    if args.capture_video:
        found = importlib.util.find_spec("imageio_ffmpeg") is not None
        require(found, "--capture-video", "", "needs imageio-ffmpeg: pip install 'cleanrl-distributed[video]'")
