"""Whole games played by a trained agent, their scores and videos: python -m cleanrl_utils.evaluate --help"""

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro

from cleanrl_utils import EXIT_INTERRUPTED
from cleanrl_utils.config import Fault, Fraction, NonNegative, Positive, UsageError
from cleanrl_utils.runs import tool
from cleanrl_utils.scores import human_normalized

RESULT, BEST_VIDEO, MEDIAN_VIDEO = "evaluation.json", "evaluation-best.mp4", "evaluation-median.mp4"
EXPORT_FORMAT, EXPORT_VERSION = "cleanrl-distributed agent", 1
PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Args:
    agent: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="AGENT")]
    """a checkpoint, a folder of checkpoints (runs/NAME; its newest is taken) or an exported agent: a path or a URL such
    as s3://bucket/folder"""
    script: str | None = None
    """the script whose `Agent` and `make_env` trained it; if not set, the script that the checkpoint names, from the
    working folder or from this project"""
    games: Positive[int] = 100
    """number of games; game i has its own seed, so that long games count as much as short ones"""
    seed: NonNegative[int] = 1
    """all games follow from it: the same seed gives the same scores, whatever --num-envs"""
    num_envs: Positive[int] | None = None
    """games played at a time, each in a process of its own; the number of cores if not set"""
    greedy: bool = False
    """take the likeliest action. By default actions are sampled from the policy, as in training and for the published
    scores of PPO; a greedy agent plays at most 30 different games if actions are not sticky, and can get stuck"""
    sticky_actions: Fraction[float] | None = None
    """probability that the emulator repeats the last action instead, in each frame; if not set, the game's own: 0 for
    *NoFrameskip-v4, 0.25 for ALE/*-v5"""
    episodic_life: bool = False
    """start anew after each lost life, as in training, where this presses FIRE for the agent; scores are of whole games
    in either case"""
    capture_video: bool = False
    """record the best and the median game, played again from their seeds (needs the `video` extra)"""
    out: str | None = None
    """folder for evaluation.json and the videos; if not set, the agent's, or runs/NAME if that is in an object store"""


@dataclass(frozen=True)
class SavedAgent:
    """What a checkpoint or an exported agent says: data only, nothing in it is executed."""

    path: str  # absolute, or a URL
    folder: str | None  # where results belong; None: not on a disk
    weights: dict[str, Any]
    config: dict[str, Any]
    command: list[str]
    global_step: int
    machine: dict[str, Any]

    @property
    def env_id(self) -> str:
        return self.config["env_id"]

    @property
    def name(self) -> str:
        """The run's: that of the folder."""
        path = self.path.rstrip("/")
        return os.path.basename(os.path.dirname(path) if path.endswith(".pt") else path)

    @property
    def results_folder(self) -> str:
        return self.folder or f"runs/{self.name}"


def load_agent(path: str) -> SavedAgent:
    """Read a checkpoint file, the newest checkpoint of a folder, or an exported agent, by fsspec. UsageError, Fault."""
    from cleanrl_utils.checkpoint import CheckpointFolder, Unreadable

    try:
        folder = CheckpointFolder(path)
    except UsageError as error:
        raise UsageError(str(error).removeprefix("--checkpoint-dir: ")) from None
    try:
        is_file = folder.fs.isfile(folder.path)
        exported = not is_file and folder.fs.isfile(f"{folder.path}/model.safetensors")
        exists = is_file or exported or bool(folder.files())
    except Fault:
        raise
    except Exception as error:  # whatever a store says
        raise Fault(f"can't read {path}: {type(error).__name__}: {error}".splitlines()[0]) from None
    if not exists:
        there = folder.fs.exists(folder.path)
        raise UsageError(f"{path}: {'holds no checkpoint and no exported agent' if there else 'does not exist'}")
    if exported:
        return _load_export(path, folder)
    try:
        state = folder.read(folder.path) if is_file else folder.newest()
    except Unreadable as error:
        raise UsageError(f"{path}: {error}") from None
    assert state is not None
    return _checked(
        path=folder.path if folder.local else path,
        folder=(os.path.dirname(folder.path) if is_file else folder.path) if folder.local else None,
        weights=state["agent"],
        config=state["config"],
        command=state.get("command", ["ppo_atari.py"]),  # early checkpoints have none
        global_step=state["global_step"],
        machine=state["machine"],
    )


def _load_export(path: str, folder: Any) -> SavedAgent:
    if importlib.util.find_spec("safetensors") is None:
        raise UsageError(f"{path}: needs safetensors: pip install 'cleanrl-distributed[hub]'")
    import safetensors.torch

    try:
        saved = json.loads(folder.fs.cat_file(f"{folder.path}/config.json"))
        if saved.get("format") != EXPORT_FORMAT:
            raise ValueError("config.json is not of an agent exported here")
        if saved["version"] > EXPORT_VERSION:
            raise ValueError(f"format {saved['version']}, of a newer version of this project than this one")
        weights = safetensors.torch.load(folder.fs.cat_file(f"{folder.path}/model.safetensors"))
        told = {name: saved[name] for name in ("config", "command", "global_step", "machine")}
    except Exception as error:  # whatever the parsers make of arbitrary bytes
        raise UsageError(f"{path}: {type(error).__name__}: {error}".splitlines()[0]) from None
    where = folder.path if folder.local else path
    return _checked(path=where, folder=folder.path if folder.local else None, weights=weights, **told)


def _checked(**told: Any) -> SavedAgent:
    """The agent; a usage error where a file from elsewhere has told nonsense. The script's name is a plain one."""
    command, config, machine = told["command"], told["config"], told["machine"]
    fine = isinstance(command, list) and len(command) > 0 and all(isinstance(word, str) for word in command)
    fine = fine and os.path.basename(command[0]) == command[0] != ""
    fine = fine and isinstance(config, dict) and isinstance(config.get("env_id"), str)
    fine = fine and isinstance(machine, dict) and isinstance(machine.get("processes"), int)
    if not fine or not isinstance(told["global_step"], int):
        raise UsageError(f"{told['path']}: not the command, config, machine and step of an agent that was trained here")
    return SavedAgent(**told)


def find_script(saved: SavedAgent, given: str | None) -> Path:
    """The training script: the one that is given, else one with the name that the checkpoint has noted.

    That name is the only word that a checkpoint has in what is executed, so it must be a plain file name, of a file
    in the working folder or in this project that is such a script.
    """
    if given is not None:
        if not os.path.isfile(given):
            raise UsageError(f"--script {given}: does not exist")
        return Path(given)
    name = os.path.basename(saved.command[0])
    for folder in (Path.cwd(), PROJECT):
        if (folder / name).is_file() and is_training_script(folder / name):
            return folder / name
    raise UsageError(f"{saved.path} was trained by {name}, which is not here: say where it is by --script")


def is_training_script(path: Path) -> bool:
    """Whether a file defines `Agent` and `make_env`, without executing it."""
    try:
        names = {getattr(node, "name", None) for node in ast.parse(path.read_text()).body}
    except (SyntaxError, ValueError, OSError):
        return False
    return path.suffix == ".py" and {"Agent", "make_env"} <= names


def import_script(path: Path) -> ModuleType:
    """Import a training script by its path; a usage error says what is wrong with it."""
    spec = importlib.util.spec_from_file_location("evaluated_script", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--script {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    sys.path.insert(0, str(path.resolve().parent))  # as `python script.py` does
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever is in it
        raise UsageError(f"--script {path}: {type(error).__name__}: {error}".splitlines()[0]) from None
    for name in ("Agent", "make_env"):
        if not hasattr(module, name):
            raise UsageError(f"--script {path}: defines no {name}")
    return module


class Player:
    """An agent and a game of its script's `make_env`, with whole games and raw scores."""

    def __init__(self, saved: SavedAgent, script: Path, args: Args):
        import ale_py
        import torch

        from cleanrl_utils.atari import make_vector
        from cleanrl_utils.checkpoint import load_weights

        module = import_script(script)
        takes = inspect.signature(module.make_env).parameters
        wanted = {"episodic_life": args.episodic_life, "clip_reward": False}
        if args.episodic_life and "episodic_life" not in takes:
            raise UsageError(f"--episodic-life: make_env of {script} has no such keyword")
        self.greedy, self.episodic_life = args.greedy, args.episodic_life
        try:
            thunk = module.make_env(saved.env_id, None, False, "", **{k: v for k, v in wanted.items() if k in takes})
            self.envs = make_vector([thunk], "sync")
            self.agent = module.Agent(self.envs).eval()
        except Exception as error:
            raise UsageError(f"--script {script}: {type(error).__name__}: {error}".splitlines()[0]) from None
        load_weights(self.agent, saved.weights)
        self.env: Any = self.envs.envs[0]  # type: ignore[union-attr]
        actions: Any = self.envs.single_action_space
        self.num_actions = int(actions.n)
        emulator = self.env.unwrapped.ale if isinstance(self.env.unwrapped, ale_py.AtariEnv) else None
        if args.capture_video and self.env.render_mode != "rgb_array":
            raise UsageError(f"--capture-video: the game of {script} has no render_mode rgb_array")
        if args.sticky_actions is not None:
            if emulator is None:
                raise UsageError(f"--sticky-actions: the game of {script} is not the Atari emulator's")
            emulator.setFloat("repeat_action_probability", args.sticky_actions)  # each game loads the ROM anew with it
        self.sticky_actions = emulator.getFloat("repeat_action_probability") if emulator is not None else 0.0
        try:
            self.action(self.env.observation_space.sample(), torch.Generator())
        except Exception as error:
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UsageError(f"--script {script}: Agent.get_action_and_value(x, noise=...): {line}") from None

    def action(self, obs: Any, generator: Any) -> int:
        """The policy's action: the arg-max of logits + Gumbel noise samples, that of the logits alone is greedy.

        One observation at a time: in a larger batch the sums round differently, and the scores would depend on
        how many games are played at once.
        """
        import torch

        noise = torch.zeros(1, self.num_actions)
        if not self.greedy:
            noise = -torch.empty(1, self.num_actions).exponential_(generator=generator).log()
        with torch.inference_mode():
            return int(self.agent.get_action_and_value(torch.as_tensor(obs)[None], noise=noise)[0])

    def play(self, seed: int, recorder: Any = None) -> tuple[float, int]:
        """One whole game from its seed: (episodic_return, episodic_length), the raw score and the agent's steps."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        obs, _ = self.env.reset(seed=seed)
        episodic_return, episodic_length = 0.0, 0
        while True:
            if recorder:
                recorder.frame(self.env.render())
            obs, reward, terminated, truncated, _ = self.env.step(self.action(obs, generator))
            episodic_return, episodic_length = episodic_return + float(reward), episodic_length + 1
            if terminated or truncated:
                if recorder:
                    recorder.frame(self.env.render())
                obs, info = self.env.reset()
                if "games" in info:  # of AtariGame, with what was scored in resets
                    return info["games"][0]
                if not self.episodic_life:
                    return episodic_return, episodic_length


_player: Player  # the workers are forked, and have it


def _start_worker() -> None:
    import signal

    from cleanrl_utils.process import die_with_parent

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()


def _play(seed: int) -> tuple[float, int]:
    return _player.play(seed)


def play_games(player: Player, seeds: list[int], num_envs: int) -> list[tuple[float, int]]:
    """(episodic_return, episodic_length) of the games of `seeds`, in their order, `num_envs` at a time."""
    import multiprocessing

    from tqdm import tqdm

    global _player
    _player = player
    games = []
    pool = None
    if num_envs > 1:
        pool = ProcessPoolExecutor(min(num_envs, len(seeds)), multiprocessing.get_context("fork"), _start_worker)
    bar: Any = tqdm(total=len(seeds), unit="game", disable=None, dynamic_ncols=True)  # None: only on a terminal
    try:
        with bar:
            for game in pool.map(_play, seeds) if pool else map(_play, seeds):
                games.append(game)
                bar.update()
    except BrokenProcessPool:
        raise Fault("a process that played games has died (out of memory?); try a smaller --num-envs") from None
    except Exception as error:  # of a changed script
        raise Fault(f"game {len(games)}: {type(error).__name__}: {error}".splitlines()[0]) from None
    if pool:
        pool.shutdown()
    return games


def summary(returns: list[float], env_id: str) -> dict[str, Any]:
    """Mean, interquartile mean (of the middle half), median and standard deviation of these games.

    The first three also on the scale on which random play is 0 and a human 1; None where no human score is published.
    """
    import numpy as np

    ordered = np.sort(returns)
    cut = len(ordered) // 4
    figures = {
        "mean": np.mean(ordered),
        "iqm": np.mean(ordered[cut : len(ordered) - cut]),
        "median": np.median(ordered),
    }
    return {
        **{name: float(value) for name, value in figures.items()},
        "std": float(np.std(ordered)),
        "human_normalized": {name: human_normalized(env_id, float(value)) for name, value in figures.items()},
    }


def best_and_median(returns: list[float]) -> tuple[int, int]:
    """The numbers of the best game and of the median one, the lower of the two where their number is even."""
    order = sorted(range(len(returns)), key=lambda i: (returns[i], -i))
    return order[-1], order[(len(order) - 1) // 2]


def record(player: Player, seed: int, game: tuple[float, int], path: str) -> None:
    """Play a game again and record it. Fault unless it is the same game."""
    from cleanrl_utils.atari import VideoRecorder

    with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
        recorder = VideoRecorder(folder, max_frames=sys.maxsize)
        recorder.new_game()
        again = player.play(seed, recorder)
        recorder.close()
        if again != game:
            raise Fault(f"the game of seed {seed} gave {game}, and {again} when played again: its script draws on more")
        os.replace(f"{folder}/rl-video-episode-0.mp4", path)


def evaluate(args: Args) -> dict[str, Any]:
    """Play, write `evaluation.json` and the videos; what the file says."""
    if args.capture_video and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise UsageError("--capture-video: needs imageio-ffmpeg: pip install 'cleanrl-distributed[video]'")
    saved = load_agent(args.agent)
    script = find_script(saved, args.script)
    import torch

    from cleanrl_utils import seeding

    torch.set_num_threads(1)  # the games are what runs side by side; and sums over threads would round differently
    player = Player(saved, script, args)
    out = args.out or saved.results_folder
    try:
        os.makedirs(out, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}") from None
    seeds = seeding.env_seeds(args.seed, 0, args.games)
    games = play_games(player, seeds, args.num_envs or len(os.sched_getaffinity(0)))
    returns, lengths = [game[0] for game in games], [game[1] for game in games]
    best, median = best_and_median(returns)
    result: dict[str, Any] = {
        "agent": saved.name,
        "env_id": saved.env_id,
        "global_step": saved.global_step,
        "script": script.name,
        "games": args.games,
        "seed": args.seed,
        "actions": "greedy" if args.greedy else "sampled",
        "sticky_actions": round(player.sticky_actions, 6),  # the emulator has it in single precision
        "episodic_life": args.episodic_life,
        **summary(returns, saved.env_id),
        "best_game": best,
        "median_game": median,
        "episodic_returns": returns,
        "episodic_lengths": lengths,
        "seeds": seeds,
        "versions": {name: importlib.metadata.version(name) for name in ("ale-py", "torch")},
    }
    with open(os.path.join(out, f"{RESULT}.tmp"), "w") as file:
        json.dump(result, file, indent=2)
        file.write("\n")
    for name in (RESULT, BEST_VIDEO, MEDIAN_VIDEO):  # of an earlier evaluation
        Path(out, name).unlink(missing_ok=True)
    if args.capture_video:
        for number, name in ((best, BEST_VIDEO), (median, MEDIAN_VIDEO)):
            record(player, seeds[number], games[number], os.path.join(out, name))
    os.replace(os.path.join(out, f"{RESULT}.tmp"), os.path.join(out, RESULT))
    show(result, script, out)
    return result


def show(result: dict[str, Any], script: Path, out: str) -> None:
    """The result for a reader."""
    actions = f"{result['actions']} actions, sticky with probability {result['sticky_actions']:g}"
    print(f"{result['env_id']} after {result['global_step']} steps, by {script}: {result['games']} games, {actions}")
    for name in ("mean", "iqm", "median"):
        human = result["human_normalized"][name]
        spread = f" ± {result['std']:.2f}" if name == "mean" else ""
        scale = f"   human-normalized {human:.3f}" if human is not None else ""
        print(f"{name:>8} {result[name]:10.2f}{spread}{scale}")
    for name in ("best", "median"):
        number = result[f"{name}_game"]
        print(f"{name:>8} game: {result['episodic_returns'][number]:g} (game {number})")
    files = [os.path.join(out, name) for name in (RESULT, BEST_VIDEO, MEDIAN_VIDEO)]
    print(f"wrote {', '.join(filter(os.path.exists, files))}")


def evaluate_or_leave(args: Args) -> None:
    try:
        evaluate(args)
    except KeyboardInterrupt:
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)  # at once: the workers end with this process


def main(argv: list[str]) -> int:
    return tool(evaluate_or_leave, Args, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
