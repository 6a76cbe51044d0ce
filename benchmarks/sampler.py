"""Agent steps per second of the environments alone, random actions, on one core.

Three contenders on the same games, in turns:
  limit      the bare emulator: four frames, two gray reads, one max, one resize for each step, and nothing else
  ours       `AtariGame` in a SyncVectorEnv
  gymnasium  AtariPreprocessing + FrameStackObservation in a SyncVectorEnv
The work is the same for all: no episodic life, no fire, no clipped rewards (gymnasium's wrapper has neither). The row
`ours, as trained` has the training scripts' settings: it also plays the frames of fire and of lost lives.
"""

import os
import time
from dataclasses import dataclass

import cv2
import gymnasium as gym
import numpy as np
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from cleanrl_utils.atari import AtariGame, make_vector


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"
    """the game"""
    num_envs: int = 8
    """environments in each vector"""
    steps: int = 250
    """vector steps of one measurement"""
    rounds: int = 7
    """measurements of each contender, in turns; the first round warms up and is not counted"""
    core: int | None = 0
    """pin to this core; None: do not pin"""


class BareEmulator:
    """What a step costs at the least. Games start again without no-ops."""

    def __init__(self, env_id, num_envs):
        self.games = [gym.make(env_id, frameskip=1).unwrapped for _ in range(num_envs)]
        for game in self.games:
            game.reset(seed=0)
        self.frames = np.empty((2, *self.games[0].ale.getScreenDims()), np.uint8)

    def step(self, actions):
        for game, action in zip(self.games, actions, strict=True):
            ale, a = game.ale, game._action_set[action]
            for _ in range(3):
                ale.act(a)
            ale.getScreenGrayscale(self.frames[0])
            ale.act(a)
            ale.getScreenGrayscale(self.frames[1])
            np.maximum(self.frames[0], self.frames[1], out=self.frames[0])
            cv2.resize(self.frames[0], (84, 84), interpolation=cv2.INTER_AREA)
            if ale.game_over():
                ale.reset_game()


def main(args: Args) -> None:
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})

    def theirs():
        return FrameStackObservation(AtariPreprocessing(gym.make(args.env_id, frameskip=1)), 4)

    def ours(**kwargs):
        return make_vector([lambda s=s: AtariGame(args.env_id, s, **kwargs) for s in range(args.num_envs)], "sync")

    contenders = {
        "limit": BareEmulator(args.env_id, args.num_envs),
        "ours": ours(episodic_life=False, fire_reset=False, clip_reward=False),
        "ours, as trained": ours(),
        "gymnasium": SyncVectorEnv([theirs] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP),
    }
    for vector in list(contenders.values())[1:]:
        vector.reset(seed=0)
    num_actions = contenders["ours"].single_action_space.n
    actions = np.random.default_rng(0).integers(num_actions, size=(args.steps, args.num_envs))
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds + 1):
        for name, vector in contenders.items():
            start = time.perf_counter()
            for action in actions:
                vector.step(action)
            speeds[name].append(args.steps * args.num_envs / (time.perf_counter() - start))

    print(f"{args.env_id}, {args.num_envs} environments, one core, {args.rounds} rounds: median (min..max)")
    print(f"{'':18} {'steps/s':>22}   {'x gymnasium':>18}")
    for name, measured in speeds.items():
        values = np.array(measured[1:])
        ratios = values / np.array(speeds["gymnasium"][1:])
        low, middle, high = np.percentile(values, [0, 50, 100])
        spread = f"({ratios.min():.2f}..{ratios.max():.2f})"
        print(f"{name:18} {middle:8.0f} ({low:.0f}..{high:.0f})   {np.median(ratios):6.2f} {spread}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
