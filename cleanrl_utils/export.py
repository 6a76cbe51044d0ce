"""A trained agent as files to share: python -m cleanrl_utils.export --help"""

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from cleanrl_utils.config import Fault, UsageError, require
from cleanrl_utils.evaluate import (
    EXPORT_FORMAT,
    EXPORT_VERSION,
    MEDIAN_VIDEO,
    RESULT,
    SavedAgent,
    find_script,
    load_agent,
)
from cleanrl_utils.events import checked_evaluation
from cleanrl_utils.runs import tool
from cleanrl_utils.scores import game_name

SHOWN = ("games", "seed", "actions", "sticky_actions", "episodic_life", "median")  # of an evaluation, in the card
VIDEO = "replay.mp4"  # the hub plays a file of this name beside the model card


@dataclass(frozen=True)
class Args:
    agent: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="AGENT")]
    """a checkpoint, or a folder of checkpoints (runs/NAME; its newest is taken): a path or a URL such as
    s3://bucket/folder. Its evaluation.json goes along if it is of the same step"""
    out: str | None = None
    """folder for model.safetensors, config.json and README.md (the model card); exports/NAME if not set"""
    script: str | None = None
    """the script that trained it, which goes along; if not set, the one that the checkpoint names, if it is here"""
    push_to_hub: str | None = None
    """also upload the folder to this repository of the Hugging Face hub, such as NAME/pong; it is made if it does not
    exist. `hf auth login` or HF_TOKEN identify you"""
    private: bool = False
    """make the repository of --push-to-hub a private one"""


def find_evaluation(saved: SavedAgent) -> tuple[dict[str, Any] | None, str]:
    """What `cleanrl_utils.evaluate` has written about this agent, if it has, and the folder of it."""
    try:
        with open(os.path.join(saved.results_folder, RESULT)) as file:
            result = checked_evaluation(json.load(file))
        _ = [result[name] for name in SHOWN], result["human_normalized"]["mean"]
        same = result["global_step"] == saved.global_step and result["env_id"] == saved.env_id
    except FileNotFoundError:
        return None, saved.results_folder
    except (ValueError, KeyError, TypeError, OSError) as error:
        line = f"{type(error).__name__}: {error}"
        print(f"warning: skipped {saved.results_folder}/{RESULT}: {line}", file=sys.stderr)
        return None, saved.results_folder
    if not same:
        steps = f"is of step {result['global_step']}, the checkpoint of {saved.global_step}"
        print(f"notice: {saved.results_folder}/{RESULT} {steps}: left out; evaluate again", file=sys.stderr)
    return result if same else None, saved.results_folder


def training_command(saved: SavedAgent) -> str:
    """The command line of the run's last start."""
    processes = saved.machine["processes"]
    launcher = f"torchrun --standalone --nnodes=1 --nproc_per_node={processes}" if processes > 1 else "python"
    return f"{launcher} {shlex.join(saved.command)}"


def model_card(saved: SavedAgent, result: dict[str, Any] | None, where: str, script: str | None) -> str:
    """README.md with the hub's metadata: https://huggingface.co/docs/hub/model-cards

    `where`: the repository, or the folder's name; `script`: the name of the one beside it.
    """
    from huggingface_hub import EvalResult, ModelCardData

    score = None if result is None else f"{result['mean']:.2f} +/- {result['std']:.2f}"
    task = "reinforcement-learning"
    evaluation = [
        EvalResult(
            task_type=task,
            task_name=task,
            dataset_type=saved.env_id,
            dataset_name=saved.env_id,
            metric_type="mean_reward",
            metric_name="mean_reward",
            metric_value=score,
        )
    ]
    tags = [saved.env_id, game_name(saved.env_id), "atari", "ppo", "deep-reinforcement-learning", task]
    data = ModelCardData(
        library_name="cleanrl-distributed",
        pipeline_tag=task,
        tags=tags,
        model_name="PPO",
        eval_results=evaluation if result else None,
    )
    text = [f"---\n{data.to_yaml()}\n---\n", f"# PPO on {saved.env_id}\n"]
    text.append(
        f"An agent trained by `{saved.command[0]}` of cleanrl-distributed, single-file PPO in the manner of CleanRL, "
        f"for {saved.global_step:,} environment steps of 4 emulator frames each.\n"
    )
    if result:
        human = result["human_normalized"]
        rows = [
            ("games", f"{result['games']}, whole, raw scores, seed {result['seed']}"),
            ("actions", f"{result['actions']}, sticky with probability {result['sticky_actions']:g}"),
            *[("after a lost life", "a new start, as in training")] * result["episodic_life"],
            ("mean", score),
            ("interquartile mean", f"{result['iqm']:.2f}"),
            ("median", f"{result['median']:.2f}"),
            *[("human-normalized mean", f"{human['mean']:.3f}") for _ in [0] if human["mean"] is not None],
        ]
        text.append("## Evaluation\n\n| | |\n|---|---|\n" + "\n".join(f"| {k} | {v} |" for k, v in rows) + "\n")
    folder = os.path.basename(where)
    download = f"hf download {where} --local-dir {folder}\n" if "/" in where else ""
    evaluate = shlex.join([folder, *(["--script", f"{folder}/{script}"] if script else [])])
    text.append(
        f"## Use\n\n```bash\n# in a checkout of the project that trained it, after `make setup`\n{download}"
        f"python -m cleanrl_utils.evaluate {evaluate}\n```\n\n"
        "`model.safetensors` holds the weights of the script's `Agent`, `config.json` what it was trained with"
        + (f", `{script}` is the script; read it before you run it.\n" if script else ".\n")
    )
    versions = ", ".join(f"{name} {value}" for name, value in saved.machine.items())
    text.append(f"## Training\n\n```bash\n{training_command(saved)}\n```\n\n{versions}\n")
    escaped = {name: str(value).replace("|", "\\|") for name, value in sorted(saved.config.items())}
    config = "\n".join(f"| {name} | {value} |" for name, value in escaped.items())
    text.append(f"| hyperparameter | value |\n|---|---|\n{config}\n")
    return "\n".join(text)


def export(args: Args) -> None:
    """Write the folder and upload it if asked to."""
    for package, name in (("safetensors", "safetensors"), ("huggingface_hub", "huggingface-hub")):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"export needs {name}: pip install 'cleanrl-distributed[hub]'")
    import safetensors
    import safetensors.torch
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    require(args.push_to_hub is not None or not args.private, "--private", "", "needs --push-to-hub")
    if args.push_to_hub is not None:
        try:
            validate_repo_id(args.push_to_hub)
        except HFValidationError as error:
            raise UsageError(f"--push-to-hub {args.push_to_hub}: {error}".splitlines()[0]) from None
    saved = load_agent(args.agent)
    try:
        script = find_script(saved, args.script)
    except UsageError:
        if args.script is not None:
            raise
        script = None
    result, results = find_evaluation(saved)
    out = args.out or f"exports/{saved.name}"
    ours = os.path.isfile(os.path.join(out, "model.safetensors"))
    if os.path.exists(out) and not ours and (not os.path.isdir(out) or os.listdir(out)):
        raise UsageError(f"--out {out}: exists and is not an exported agent")

    files = {"config.json": _json(_config(saved))}
    if result:
        files[RESULT] = _json(result)
    where = args.push_to_hub or os.path.basename(os.path.abspath(out))
    files["README.md"] = model_card(saved, result, where, saved.command[0] if script else None)
    # copies: the format has no tensors that share their memory, as tied weights do
    weights = {name: tensor.contiguous().clone() for name, tensor in saved.weights.items()}
    parent = os.path.dirname(os.path.abspath(out))
    try:
        os.makedirs(parent, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent) as made:  # all of it, or nothing
            if script:
                shutil.copyfile(script, os.path.join(made, saved.command[0]))
            for name, text in files.items():
                with open(os.path.join(made, name), "w") as file:
                    file.write(text)
            safetensors.torch.save_file(weights, os.path.join(made, "model.safetensors"), metadata={"format": "pt"})
            if result and os.path.isfile(os.path.join(results, MEDIAN_VIDEO)):
                shutil.copyfile(os.path.join(results, MEDIAN_VIDEO), os.path.join(made, VIDEO))
            os.makedirs(out, exist_ok=True)
            for name in (RESULT, VIDEO):  # of the agent that was exported here before
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(out, name))
            for name in os.listdir(made):
                os.replace(os.path.join(made, name), os.path.join(out, name))
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"--out {out}: {getattr(error, 'strerror', None) or error}") from None
    print(f"wrote {out}: {', '.join(sorted(os.listdir(out)))}")
    if args.push_to_hub is not None:
        push(out, args.push_to_hub, args.private)


def _config(saved: SavedAgent) -> dict[str, Any]:
    return {
        "format": EXPORT_FORMAT,
        "version": EXPORT_VERSION,
        "command": saved.command,
        "config": saved.config,
        "global_step": saved.global_step,
        "machine": saved.machine,
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def push(folder: str, repo: str, private: bool) -> None:
    """Upload a folder to the hub."""
    import huggingface_hub

    api = huggingface_hub.HfApi(library_name="cleanrl-distributed")
    try:
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(url.repo_id).private:  # it was there, and stays as it is
            raise Fault(f"--private: {repo} is a public repository; nothing was uploaded")
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="A PPO agent by cleanrl-distributed")
    except Fault:
        raise
    except Exception as error:  # whatever the hub or the network says
        raise Fault(f"--push-to-hub {repo}: {type(error).__name__}: {error}".splitlines()[0]) from None
    print(f"uploaded to {url}")


def main(argv: list[str]) -> int:
    return tool(export, Args, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
