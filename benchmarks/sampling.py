"""Agent steps per second of the environments alone, with random actions.

First on one core, at equal work (no episodic life, no fire, no clipped rewards: gymnasium's wrapper has neither):

  limit             the bare emulator: four frames, two gray reads, one max, one resize a step, and nothing else
  ours              `AtariGame` in a SyncVectorEnv
  ours, as trained  with the training scripts' settings: it also plays the frames of fire and of lost lives
  gymnasium         AtariPreprocessing + FrameStackObservation in a SyncVectorEnv

Then on all cores, by number of environments: ours (sync; async; and processes: sync in one for each core, as torchrun's
are), gymnasium's AsyncVectorEnv, and the native samplers of EnvPool and ale-py (`peers` extra). Memory is of all
processes together, shared pages counted once.
"""

import multiprocessing
import os
import time
from dataclasses import dataclass
from typing import Any

import common
import cv2
import gymnasium as gym
import numpy as np
import tyro
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from cleanrl_utils.atari import AtariGame, make_vector
from cleanrl_utils.seeding import share

PLAIN: dict[str, Any] = {"episodic_life": False, "fire_reset": False, "clip_reward": False}


@dataclass
class Args:
    game: str = "Breakout"
    """the game, without NoFrameskip-v4"""
    num_envs: tuple[int, ...] = (1, 8, 64)
    """environments of the vectors on all cores; the vectors on one core have 8"""
    seconds: float = 4.0
    """length of one measurement"""
    rounds: int = 5
    """measurements of each contender, in turns"""
    peers: bool = True
    """also measure EnvPool and ale-py's vector environment"""
    out: str = "benchmarks/results"
    """folder for the JSON files and pictures"""


class BareEmulator:
    """What a step costs at the least. Games start again without no-ops."""

    def __init__(self, env_id: str, num_envs: int):
        self.games = [gym.make(env_id, frameskip=1).unwrapped for _ in range(num_envs)]
        for game in self.games:
            game.reset(seed=0)
        self.frames = np.empty((2, *self.games[0].ale.getScreenDims()), np.uint8)  # type: ignore[attr-defined]

    def step(self, actions) -> None:
        for game, action in zip(self.games, actions, strict=True):
            ale, a = game.ale, game._action_set[action]  # type: ignore[attr-defined]
            for _ in range(3):
                ale.act(a)
            ale.getScreenGrayscale(self.frames[0])
            ale.act(a)
            ale.getScreenGrayscale(self.frames[1])
            np.maximum(self.frames[0], self.frames[1], out=self.frames[0])
            cv2.resize(self.frames[0], (84, 84), interpolation=cv2.INTER_AREA)
            if ale.game_over():
                ale.reset_game()

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


def make(kind: str, game: str, num_envs: int) -> Any:
    env_id = f"{game}NoFrameskip-v4"

    def theirs() -> gym.Env:
        import ale_py

        gym.register_envs(ale_py)
        return FrameStackObservation(AtariPreprocessing(gym.make(env_id, frameskip=1)), 4)

    def ours(vector: str, **kwargs: Any) -> Any:
        return make_vector([lambda s=s: AtariGame(env_id, s, **kwargs) for s in range(num_envs)], vector)  # type: ignore[misc]

    cores = len(os.sched_getaffinity(0))
    if kind == "limit":
        return BareEmulator(env_id, num_envs)
    if kind == "ours, as trained":
        return ours("sync")
    if kind in ("ours", "ours, sync", "ours, processes"):
        return ours("sync", **PLAIN)
    if kind == "ours, async":
        return ours("async", **PLAIN)
    if kind == "gymnasium":
        return SyncVectorEnv([theirs] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    if kind == "gymnasium, async":
        return AsyncVectorEnv([theirs] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    if kind == "envpool":
        import envpool

        return envpool.make(f"{game}-v5", env_type="gymnasium", num_envs=num_envs, num_threads=min(cores, num_envs))
    from ale_py.vector_env import AtariVectorEnv

    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in game).lstrip("_")
    return AtariVectorEnv(game=name, num_envs=num_envs, num_threads=min(cores, num_envs))


def sample(kind: str, game: str, num_envs: int, seconds: float, core: int | None, pipe: Any) -> None:
    """In a process of its own: (steps per second, notes)."""
    import psutil

    if core is not None:
        os.sched_setaffinity(0, {core})
    envs = make(kind, game, num_envs)
    envs.reset()
    generator = np.random.default_rng(0)
    actions = generator.integers(4, size=(512, num_envs))

    def busy() -> float:
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in family)

    def run(seconds: float) -> tuple[int, float]:
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for _ in range(max(1, 64 // num_envs)):
                envs.step(actions[steps % 512])
                steps += 1
        return steps, time.perf_counter() - start

    run(seconds / 4)
    before = busy()
    steps, took = run(seconds)
    cores = (busy() - before) / took
    memory = sum(p.memory_full_info().pss for p in [psutil.Process(), *psutil.Process().children(recursive=True)]) / 1e6
    pipe.send((steps * num_envs / took, {"MB": memory, "cores busy": cores}))
    envs.close()


def contender(kind: str, args: Args, num_envs: int, core: int | None = None):
    """Measures in a new process; `ours, processes` in one for each core, which are added up."""

    def measure() -> tuple[float, dict[str, float]]:
        context = multiprocessing.get_context("spawn")
        shares = [num_envs]
        if kind == "ours, processes":
            cores = min(len(os.sched_getaffinity(0)), num_envs)
            shares = [share(num_envs, rank, cores)[1] for rank in range(cores)]
        found = []
        for count in shares:
            here, there = context.Pipe()
            process = context.Process(target=sample, args=(kind, args.game, count, args.seconds, core, there))
            process.start()
            there.close()
            found.append((here, process))
        results = [here.recv() for here, _ in found]
        for _, process in found:
            process.join()
        return sum(value for value, _ in results), {x: sum(notes[x] for _, notes in results) for x in results[0][1]}

    return measure


def main(args: Args) -> None:
    core = min(os.sched_getaffinity(0))
    kinds = ("limit", "ours", "ours, as trained", "gymnasium")
    measured = common.in_turns({kind: contender(kind, args, 8, core) for kind in kinds}, args.rounds)
    title = f"{args.game}, environments alone, 8 of them on one core"
    common.report("sampling_one_core", title, "steps/s", measured, "gymnasium", args.out, args)

    kinds = (
        "ours, sync",
        "ours, async",
        "ours, processes",
        "gymnasium, async",
        *(("envpool", "ale-py") if args.peers else ()),
    )
    rows = {f"{kind} {n}": contender(kind, args, n) for n in args.num_envs for kind in kinds}
    measured = common.in_turns(rows, args.rounds)
    title = f"{args.game}, environments alone, on {len(os.sched_getaffinity(0))} cores"
    baseline = f"{'envpool' if args.peers else 'ours, sync'} {max(args.num_envs)}"
    common.report("sampling", title, "steps/s", measured, baseline, args.out, args)
    one, eight = measured.get("ours, sync 1"), measured.get("ours, async 8")
    if one and eight:
        faster = [a / b for a, b in zip(eight.values, one.values, strict=True)]
        larger = [a / b for a, b in zip(eight.notes["MB"], one.notes["MB"], strict=True)]
        steps, memory = common.spread(faster, 2), common.spread(larger, 2)
        print(f"8 environments, async, against 1: {steps} x the steps, {memory} x the memory")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
