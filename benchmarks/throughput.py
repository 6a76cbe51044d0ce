"""Steps per second of whole trainings on this CPU: ours against others at the same work, and against the limit.

The work: Breakout, 16 environments in all, 128 steps, 4 minibatches, 4 epochs, CleanRL's network. In turns:

  ours, fp32/bf16   ppo_atari_multigpu.py, one process for each core, its environments dealt out
  ours, async       one process, with worker processes for the environments
  sb3, ...          Stable-Baselines3's PPO (`peers` extra), its environments in the process or in subprocesses
  cleanrl           CleanRL's ppo_atari_multigpu.py, if --cleanrl names the file in a checkout; the renamed wrappers of
                    gymnasium 1.x are put in, nothing else
  limit, ...        what the same steps cost at the least: 1 / (bare emulator + gray reads + resize, plus a forward for
                    each step and 4 epochs of forward and backward, in the fastest layout), in one process for each
                    core at once, with nothing between them
"""

import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import common
import tyro

STEPS, MINIBATCHES, EPOCHS = 128, 4, 4


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"
    """the game"""
    num_envs: int = 16
    """environments of the whole job"""
    nproc: int = len(os.sched_getaffinity(0))
    """processes of the data-parallel contenders"""
    iterations: int = 7
    """iterations of each training; the first 2 are not counted"""
    rounds: int = 3
    """how often each contender is measured"""
    cleanrl: str | None = None
    """CleanRL's ppo_atari_multigpu.py"""
    only: tuple[str, ...] = ()
    """measure only the contenders whose name contains one of these words"""
    out: str = "benchmarks/results"
    """folder for throughput.json and throughput.png"""


def todays(source: str) -> str:
    """CleanRL's script for gymnasium 1.x: renamed wrappers, registered games. Its own wrappers are those of SB3."""
    for old, new in (
        ("from cleanrl_utils.atari_wrappers import", "from stable_baselines3.common.atari_wrappers import"),
        ("import gymnasium as gym\n", "import ale_py\nimport gymnasium as gym\ngym.register_envs(ale_py)\n"),
        ("gym.wrappers.GrayScaleObservation(", "gym.wrappers.GrayscaleObservation("),
        ("gym.wrappers.FrameStack(", "gym.wrappers.FrameStackObservation("),
    ):
        assert old in source, f"not the script that was expected: no {old!r}"
        source = source.replace(old, new)
    return source


def limit(env_id: str, num_envs: int, bf16: bool, pipe) -> None:
    """One process of the limit: seconds per agent step, sent to the pipe at the end of each measurement."""
    import torch
    from sampling import BareEmulator

    torch.set_num_threads(1)
    from cleanrl_utils.process import keep_freed_memory

    keep_freed_memory()
    from types import SimpleNamespace

    from ppo_atari import Agent

    space = SimpleNamespace(single_action_space=SimpleNamespace(n=4))
    agent = Agent(space, precision="bf16" if bf16 else "fp32")
    agent.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    games = BareEmulator(env_id, num_envs)
    frames = torch.randint(0, 256, (num_envs * STEPS // MINIBATCHES, 84, 84, 4), dtype=torch.uint8).movedim(-1, 1)

    def forward_and_backward() -> None:
        hidden = agent.encode(frames)
        (agent.actor(hidden).sum() + agent.critic(hidden).sum()).backward()

    def clock(work, repeats: int) -> float:
        work()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start) / repeats

    def forward() -> None:
        with torch.no_grad():
            agent.get_value(frames[:num_envs])

    while True:
        try:
            pipe.recv()
        except EOFError:  # the benchmark is over
            return
        step = clock(lambda: games.step([1] * num_envs), STEPS) + clock(forward, STEPS)
        update = clock(forward_and_backward, 2 * MINIBATCHES) * MINIBATCHES * EPOCHS
        pipe.send((step * STEPS + update) / (STEPS * num_envs))


class Limit:
    """Processes that measure the limit at the same time, one for each core; kept between the rounds."""

    def __init__(self, args: Args, bf16: bool):
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        for _ in range(args.nproc):
            here, there = context.Pipe()
            work = (args.env_id, args.num_envs // args.nproc, bf16, there)
            context.Process(target=limit, args=work, daemon=True).start()
            there.close()
            self.pipes.append(here)

    def __call__(self) -> float:
        for pipe in self.pipes:
            pipe.send(True)
        return sum(1 / pipe.recv() for pipe in self.pipes)


def main(args: Args) -> None:
    batch = args.num_envs * STEPS
    sizes = ["--env-id", args.env_id, "--total-timesteps", str(args.iterations * batch)]
    multi = str(common.ROOT / "ppo_atari_multigpu.py")
    job = [*common.torchrun(args.nproc), multi, *sizes, "--total-num-envs", str(args.num_envs)]
    alone = [sys.executable, str(common.ROOT / "ppo_atari.py"), *sizes, "--num-envs", str(args.num_envs)]
    sb3 = [sys.executable, str(common.ROOT / "benchmarks" / "sb3_ppo.py"), args.env_id, str(args.num_envs)]
    contenders: dict[str, common.Contender] = {
        "ours, fp32": lambda: common.train(job, batch),
        "ours, bf16": lambda: common.train([*job, "--precision", "bf16"], batch),
        "ours, one process": lambda: common.train(alone, batch),
        "ours, async": lambda: common.train([*alone, "--vector-env", "async"], batch),
        "sb3, dummy": lambda: common.train([*sb3, str(args.iterations * batch), "dummy"], batch, "time/fps"),
        "sb3, subproc": lambda: common.train([*sb3, str(args.iterations * batch), "subproc"], batch, "time/fps"),
        "limit, fp32": Limit(args, bf16=False),
        "limit, bf16": Limit(args, bf16=True),
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.cleanrl:
            script = Path(folder, "ppo_atari_multigpu.py")
            script.write_text(todays(Path(args.cleanrl).read_text()))
            local = ["--local-num-envs", str(args.num_envs // args.nproc)]
            theirs = [*common.torchrun(args.nproc), str(script), *sizes, *local]
            contenders["cleanrl"] = lambda: common.train(theirs, batch)
        wanted = {n: c for n, c in contenders.items() if not args.only or any(word in n for word in args.only)}
        measured = common.in_turns(wanted, args.rounds)
    title = f"PPO on {args.env_id}, {args.num_envs} environments, {args.nproc} processes"
    baseline = next((name for name in ("cleanrl", "sb3, dummy", "ours, fp32") if name in measured), None)
    common.report("throughput", title, "steps/s", measured, baseline, args.out, args)
    for precision in ("fp32", "bf16"):
        ours, most = measured.get(f"ours, {precision}"), measured.get(f"limit, {precision}")
        if ours and most:
            share = [a / b for a, b in zip(ours.values, most.values, strict=True)]
            print(f"share of the limit, {precision}: {common.spread(share, 2)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
