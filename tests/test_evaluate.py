"""Evaluation: whole games by seed, whatever plays beside them; scripts that are found; figures that are right."""

import functools
import glob
import io
import json
import math
import shutil

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from conftest import ROOT, SINGLE

import ppo_atari
from cleanrl_utils import checkpoint, evaluate, scores
from cleanrl_utils.atari import AtariGame, make_vector

BREAKOUT, PACMAN = "BreakoutNoFrameskip-v4", "MsPacmanNoFrameskip-v4"
NOOP, FIRE = 0, 1  # in Breakout
RIGHT, LEFT = 2, 3  # in Ms. Pac-Man


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@functools.cache
def untrained(env_id):
    torch.manual_seed(1)
    envs = make_vector([ppo_atari.make_env(env_id, 1, False, "")], "sync")
    weights = ppo_atari.Agent(envs).state_dict()
    envs.close()
    return weights


def policy(env_id, probabilities=None):
    """Weights of a network with these probabilities of the actions, whatever it sees; by default, an untrained one."""
    weights = {name: tensor.clone() for name, tensor in untrained(env_id).items()}
    if probabilities is not None:
        weights["actor.weight"].zero_()
        weights["actor.bias"] = torch.full_like(weights["actor.bias"], -1e9)
        for action, p in probabilities.items():
            weights["actor.bias"][action] = math.log(p)
    return weights


def save(folder, env_id=BREAKOUT, weights=None, iteration=1, script=SINGLE):
    """A checkpoint's file as `save_checkpoint` writes it, without what evaluation has no use for."""
    state = {
        "format": checkpoint.FORMAT,
        "version": checkpoint.VERSION,
        "agent": policy(env_id) if weights is None else weights,
        "config": {"env_id": env_id, "seed": 1},
        "command": [script, "--env-id", env_id],
        "global_step": 1000 * iteration,
        "machine": {"processes": 1, "torch": "2.13.0"},
    }
    data = io.BytesIO()
    torch.save(state, data)
    checkpoint.CheckpointFolder(folder).write(f"checkpoint-{iteration:08}.pt", data.getvalue())
    return folder


def played(*argv, code=0):
    """What `python -m cleanrl_utils.evaluate` has written."""
    assert evaluate.main([str(word) for word in argv]) == code
    with open("out/evaluation.json" if "--out" in argv else f"{argv[0]}/evaluation.json") as file:
        return json.load(file)


def error(capsys, *argv, code=2):
    capsys.readouterr()
    assert evaluate.main([str(word) for word in argv]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_the_same_seed_gives_the_same_scores_however_many_at_once():
    save("run")
    alone = played("run", "--games", 3, "--num-envs", 1)
    assert len(set(alone["seeds"])) == 3 and len(set(alone["episodic_lengths"])) > 1, "games must differ"
    assert played("run", "--games", 3, "--num-envs", 3) == alone
    fewer = played("run", "--games", 2, "--num-envs", 2)
    assert fewer["episodic_lengths"] == alone["episodic_lengths"][:2], "game i must not depend on the number of games"
    other = played("run", "--games", 1, "--seed", 2)
    assert other["seeds"] != alone["seeds"][:1] and other["episodic_lengths"] != alone["episodic_lengths"][:1]


def test_games_are_whole_and_scores_raw():
    """The same games as with gymnasium's own wrappers, which neither end at a lost life nor clip rewards."""
    save("run", PACMAN, policy(PACMAN, {RIGHT: 1.0}))
    result = played("run", "--games", 1, "--greedy")
    env = gym.wrappers.AtariPreprocessing(gym.make(PACMAN))
    for seed, score, length in zip(
        result["seeds"], result["episodic_returns"], result["episodic_lengths"], strict=True
    ):
        env.reset(seed=seed)
        rewards, over = [], False
        while not over:
            _, reward, terminated, truncated, _ = env.step(RIGHT)
            rewards.append(reward)
            over = terminated or truncated
        assert score == sum(rewards) and length == len(rewards)
        assert max(rewards) > 1 and env.unwrapped.ale.lives() == 0
    assert result["human_normalized"]["mean"] == pytest.approx((result["mean"] - 307.3) / (6951.6 - 307.3))


def test_episodic_life_scores_the_whole_game_too():
    """An agent that never fires gets on only by the start after each lost life."""
    save("run", weights=policy(BREAKOUT, {NOOP: 1.0}))
    result = played("run", "--games", 2, "--num-envs", 1, "--episodic-life")
    assert result["episodic_life"] is True
    game = AtariGame(BREAKOUT, episodic_life=True)
    for seed, length in zip(result["seeds"], result["episodic_lengths"], strict=True):
        game.reset(seed=seed)
        steps = starts = 0
        while game.env.ale.lives() > 0:
            steps += 1
            if game.step(NOOP)[2] and game.env.ale.lives() > 0:
                starts += 1
                game.reset()
        assert (length, starts) == (steps, 4)
        game.reset()


def test_actions_are_sampled_from_the_policy_or_greedy():
    probabilities = {0: 0.1, 1: 0.5, 2: 0.15, 3: 0.25}
    saved = evaluate.load_agent(save("run", weights=policy(BREAKOUT, probabilities)))
    obs = np.random.default_rng(1).integers(0, 255, (4, 84, 84), np.uint8)
    for greedy in (False, True):
        player = evaluate.Player(saved, ROOT / SINGLE, evaluate.Args("run", greedy=greedy))
        generator = torch.Generator().manual_seed(1)
        counts = np.bincount([player.action(obs, generator) for _ in range(400)], minlength=4) / 400
        expected = [0, 1, 0, 0] if greedy else list(probabilities.values())
        assert np.abs(counts - expected).max() < (1e-9 if greedy else 0.08)


def test_sticky_actions():
    """With probability 1 the emulator repeats the first action, none, for ever, whatever the agent does."""
    right, left = (save(f"run{action}", PACMAN, policy(PACMAN, {action: 1.0})) for action in (RIGHT, LEFT))
    free = played(right, "--games", 1, "--sticky-actions", 0.25)
    stuck = [played(agent, "--games", 1, "--sticky-actions", 1) for agent in (right, left)]
    assert (free["sticky_actions"], stuck[0]["sticky_actions"]) == (0.25, 1)
    assert stuck[0]["episodic_lengths"] == stuck[1]["episodic_lengths"] != free["episodic_lengths"]


@pytest.mark.parametrize("env_id, sticky", [("ALE/Breakout-v5", 0.25), (BREAKOUT, 0)])
def test_the_games_own_stickiness(env_id, sticky):
    saved = evaluate.load_agent(save("run", env_id))
    player = evaluate.Player(saved, ROOT / SINGLE, evaluate.Args("run"))
    assert player.sticky_actions == sticky and player.play(1) == player.play(1)


def test_the_statistics():
    figures = evaluate.summary([8, 1, 7, 2, 6, 3, 5, 4, 100], "ALE/Pong-v5")
    assert figures["median"] == 5 and figures["iqm"] == (3 + 4 + 5 + 6 + 7) / 5  # without the 2 lowest and highest
    assert figures["mean"] == pytest.approx(136 / 9) and figures["std"] == pytest.approx(np.std([*range(1, 9), 100]))
    assert figures["human_normalized"]["iqm"] == pytest.approx((5 + 20.7) / (14.6 + 20.7))
    assert evaluate.summary([1.0], "ALE/Adventure-v5")["human_normalized"]["mean"] is None
    assert evaluate.best_and_median([3, 9, 1, 9]) == (1, 0)
    assert evaluate.best_and_median([5]) == (0, 0)


def test_published_scores_are_of_the_57_games():
    ids = {scores.game_name(name) for name, spec in gym.registry.items() if "game" in spec.kwargs}
    assert len(scores.RANDOM_AND_HUMAN) == 57 and set(scores.RANDOM_AND_HUMAN) <= ids
    assert all(human > random for random, human in scores.RANDOM_AND_HUMAN.values())
    assert all(set(table) <= set(scores.RANDOM_AND_HUMAN) for table in scores.CLEANRL_PPO.values())
    assert scores.human_normalized(BREAKOUT, 30.5) == scores.human_normalized("ALE/Breakout-v5", 30.5) == 1


def test_videos_are_the_games():
    save("run")
    result = played("run", "--games", 2, "--capture-video")
    for name in ("best", "median"):
        number = result[f"{name}_game"]
        frames = imageio_ffmpeg.read_frames(f"run/evaluation-{name}.mp4")
        width, height = next(frames)["size"]
        pictures = [np.frombuffer(frame, np.uint8) for frame in frames]
        assert (width, height) == (160, 210)
        assert len(pictures) == result["episodic_lengths"][number] + 1
        assert np.std(pictures[0]) > 10 and np.abs(np.subtract(pictures[0], pictures[-1], dtype=float)).max() > 50
    played("run", "--games", 1)
    assert glob.glob("run/*.mp4") == [], "videos of an earlier evaluation must not stay beside the new scores"


def test_the_name_is_the_folders(monkeypatch):
    save("runs/first")
    monkeypatch.chdir("runs/first")
    names = [evaluate.load_agent(path).name for path in (".", "../first/", "checkpoint-00000001.pt")]
    assert names == ["first"] * 3


def test_a_video_of_another_game_is_a_fault():
    save("run")
    saved = evaluate.load_agent("run")
    player = evaluate.Player(saved, ROOT / SINGLE, evaluate.Args("run"))
    with pytest.raises(evaluate.Fault, match="when played again"):
        evaluate.record(player, 1, (1000.0, 5), "video.mp4")


def test_the_newest_readable_checkpoint_and_object_stores(capsys):
    save("memory://bucket/run", weights=policy(BREAKOUT, {FIRE: 1.0}), iteration=1)
    save("memory://bucket/run", weights=policy(BREAKOUT, {FIRE: 1.0}), iteration=2)
    folder = checkpoint.CheckpointFolder("memory://bucket/run")
    folder.fs.pipe_file(f"{folder.path}/checkpoint-00000003.pt", b"PK damaged")
    assert evaluate.main(["memory://bucket/run", "--games", "1"]) == 0
    assert "warning: skipped" in capsys.readouterr().err
    with open("runs/run/evaluation.json") as file:
        assert json.load(file)["global_step"] == 2000
    assert evaluate.main(["memory://bucket/run/checkpoint-00000001.pt", "--games", "1", "--out", "out"]) == 0
    with open("out/evaluation.json") as file:
        assert json.load(file)["global_step"] == 1000


OTHER_NETWORK = (
    ("nn.Conv2d(4, 32, 8, stride=4)", "nn.Conv2d(4, 16, 8, stride=4)"),
    ("nn.Conv2d(32, 64, 4, stride=2)", "nn.Conv2d(16, 64, 4, stride=2)"),
)


def test_a_copied_script_with_another_network(capsys):
    source = (ROOT / SINGLE).read_text()
    for old, new in OTHER_NETWORK:
        assert old in source
        source = source.replace(old, new)
    with open("mine.py", "w") as file:
        file.write(source)
    weights = policy(BREAKOUT, {FIRE: 1.0})
    weights["network.0.weight"], weights["network.0.bias"] = torch.ones(16, 4, 8, 8), torch.zeros(16)
    weights["network.2.weight"] = torch.ones(64, 16, 4, 4)
    save("run", weights=weights, script="mine.py")
    assert played("run", "--games", 1)["script"] == "mine.py"  # found in the working folder
    shutil.move("mine.py", "other.py")
    assert "was trained by mine.py, which is not here" in error(capsys, "run")
    assert played("run", "--games", 1, "--script", "other.py")["script"] == "other.py"
    assert "another network: network.0.bias (16,) there, (32,) here" in error(capsys, "run", "--script", ROOT / SINGLE)


@pytest.mark.parametrize("name", ["innocent.py", "../innocent.py", "broken.py"])
def test_a_checkpoint_cannot_choose_what_is_executed(name, tmp_path, monkeypatch, capsys):
    """Only files that are training scripts, in the working folder, by their plain name."""
    (tmp_path / "innocent.py").write_text("open('executed', 'w')\n")
    (tmp_path / "broken.py").write_text("def (\n")
    (tmp_path / "work").mkdir()
    if "/" in name:
        monkeypatch.chdir(tmp_path / "work")
        (tmp_path / "innocent.py").write_text("open('executed', 'w')\nclass Agent: ...\ndef make_env(): ...\n")
    save("run", script=name)
    says = "not the command, config, machine and step" if "/" in name else "say where it is by --script"
    assert says in error(capsys, "run")
    assert list(tmp_path.rglob("executed")) == []


BROKEN = {
    "defines no make_env": "class Agent: ...",
    "SyntaxError": "def (",
    "ZeroDivisionError: division by zero": "1 / 0",
    "Agent.get_action_and_value": "from ppo_atari import *\nclass Agent(Agent):\n  get_action_and_value = None",
    "has no such keyword": "from ppo_atari import Agent\ndef make_env(env_id, seed, capture_video, run_name): ...",
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_script_that_does_not_fit_is_one_line(says, capsys):
    with open("mine.py", "w") as file:
        file.write(BROKEN[says])
    save("run")
    assert says in error(capsys, "run", "--script", "mine.py", "--episodic-life")


def test_an_error_within_a_game_is_one_line(capsys):
    with open("mine.py", "w") as file:
        file.write(
            "from ppo_atari import *\nclass Agent(Agent):\n  n = 0\n  def get_action_and_value(self, x, noise):\n"
        )
        file.write("    self.n += 1\n    if self.n > 9: raise ValueError('of mine')\n")
        file.write("    return super().get_action_and_value(x, noise=noise)\n")
    save("run")
    for num_envs in (1, 2):
        line = error(capsys, "run", "--script", "mine.py", "--games", 2, "--num-envs", num_envs, code=1)
        assert "game 0: ValueError: of mine" in line


COUNTING = """
import gymnasium as gym, numpy as np, torch

class Counting(gym.Env):  # the score is the sum of the actions, 1 without noise, over 3 to 12 steps
    observation_space, action_space = gym.spaces.Box(0, 9, (1,), np.uint8), gym.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 13))
        return np.zeros(1, np.uint8), {}
    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.uint8), float(action), self.left == 0, False, {}

class Agent(torch.nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(envs.single_action_space.n))
    def get_action_and_value(self, x, noise=None):
        return (self.logits + noise).argmax(1), None, None, None

def make_env(env_id, seed, capture_video, run_name):
    return Counting
"""


def test_a_game_that_is_not_atari(capsys):
    with open("mine.py", "w") as file:
        file.write(COUNTING)
    save("run", "Counting", {"logits": torch.tensor([0.0, 1.0])}, script="mine.py")
    result = played("run", "--games", 20, "--greedy", "--num-envs", 2)
    assert result["episodic_returns"] == result["episodic_lengths"] and set(result["episodic_lengths"]) <= {
        *range(3, 13)
    }
    assert len(set(result["episodic_lengths"])) > 3 and result["human_normalized"]["mean"] is None
    assert "is not the Atari emulator's" in error(capsys, "run", "--sticky-actions", 0.25)
    assert "has no render_mode rgb_array" in error(capsys, "run", "--capture-video")


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "AGENT"),
        (["nowhere"], "nowhere: does not exist"),
        (["."], ".: holds no checkpoint and no exported agent"),
        (["foo://bucket"], "foo://bucket"),
        (["run", "--games", "0"], "--games 0: must be above 0"),
        (["run", "--sticky-actions", "1.5"], "--sticky-actions 1.5: must be between 0 and 1"),
        (["run", "--greedy", "True"], "--greedy True: takes no value"),
        (["run", "--script", "nowhere.py"], "--script nowhere.py: does not exist"),
        (["run", "--out", "a file/out"], "--out a file/out: Not a directory"),
        (["a file"], "a file: BadZipFile"),
        (["foreign"], "not of an agent exported here"),
    ],
)
def test_bad_usage_is_one_line(argv, says, tmp_path, capsys):
    (tmp_path / "a file").write_text("no checkpoint")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").touch()
    (tmp_path / "foreign" / "config.json").write_text("{}")
    save("run", weights={})
    before = sorted(tmp_path.rglob("*"))
    if "--out" in argv:
        save("run")
    assert says in error(capsys, *argv)
    assert sorted(tmp_path.rglob("*")) == before
