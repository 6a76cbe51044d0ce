"""One command for a machine with a GPU and no network: parity, steps per second, memory and utilisation, in 8 minutes.

  parity   two iterations of one training on the CPU, on the GPU, compiled, and in bf16: the largest difference of a
           weight, beside how far the training has moved a weight
  speed    environments 8..256, fp32 and bf16, eager and compiled, environments in the process and in workers, several
           processes on one GPU over gloo, one process with NCCL

What does not fit into --minutes, or fails, is named at the end.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import common
import torch
import tyro

STEPS = 128
SINGLE, MULTI = str(common.ROOT / "ppo_atari.py"), str(common.ROOT / "ppo_atari_multigpu.py")


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"
    """the game"""
    minutes: float = 8.0
    """no further measurement is begun after this time"""
    iterations: int = 8
    """iterations of each training; the first 2 are not counted"""
    out: str = "benchmarks/results"
    """folder for gpu.json and gpu.png"""


def weights(folder: str, *flags: str) -> torch.Tensor:
    """All parameters after a short training."""
    sizes = ["--num-envs", "8", "--num-steps", "32", "--total-timesteps", "512", "--run-name", "run"]
    line = [sys.executable, SINGLE, *sizes, *flags]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(line)}\nended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    state = torch.load(f"{folder}/runs/run/checkpoint-00000002.pt", weights_only=True, map_location="cpu")
    return torch.cat([weight.flatten() for weight in state["agent"].values()])


def parity(skipped: list[str]) -> None:
    kinds = {
        "cpu": ["--no-cuda"],
        "gpu": [],
        "gpu, compiled": ["--compile"],
        "gpu, bf16": ["--precision", "bf16"],
        "start": ["--no-cuda", "--learning-rate", "1e-30"],
    }
    found = {}
    for kind, flags in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[kind] = weights(folder, *flags)
            except SystemExit as failure:
                skipped.append(f"parity, {kind}: {failure}")
    print("\nparity after two iterations, against the CPU in fp32: largest difference of a weight\n")
    for kind, values in found.items():
        difference = (values - found["cpu"]).abs().max()
        print(f"  {kind if kind != 'start' else '(the weights at the start)':28} {difference:.2e}")


@contextlib.contextmanager
def watched_gpu(notes: dict[str, float]) -> Iterator[None]:
    """Adds the GPU's mean utilisation in % and its peak memory in MB to `notes`, by nvidia-smi."""
    line = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
    try:
        meter = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except FileNotFoundError:
        yield
        return
    rows: list[tuple[float, float]] = []

    def read() -> None:
        for row in meter.stdout or ():
            with contextlib.suppress(ValueError):
                use, memory = map(float, row.split(","))
                rows.append((use, memory))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        meter.kill()
        meter.wait()
        reader.join()
        if rows:
            steady = rows[len(rows) // 2 :]  # the first half is mostly start-up
            notes["GPU %"] = sum(use for use, _ in steady) / len(steady)
            notes["GPU MB"] = max(memory for _, memory in rows)


def main(args: Args) -> None:
    deadline = time.monotonic() + 60 * args.minutes
    skipped: list[str] = []
    if not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU that torch can use here")
    print(common.machine_line(common.machine()))
    parity(skipped)

    def contender(num_envs: int, *flags: str, nproc: int = 0):
        batch = num_envs * STEPS
        sizes = ["--env-id", args.env_id, "--total-timesteps", str(args.iterations * batch)]
        alone = [sys.executable, SINGLE, "--num-envs", str(num_envs)]
        many = [*common.torchrun(nproc), MULTI, "--total-num-envs", str(num_envs)]

        def measure() -> tuple[float, dict[str, float]]:
            more: dict[str, float] = {}
            with watched_gpu(more):
                value, notes = common.train([*(many if nproc else alone), *sizes, *flags], batch)
            return value, {**notes, **more}

        return measure

    work = ["--vector-env", "async"]
    half, compiled = ["--precision", "bf16"], ["--compile"]
    cores = len(os.sched_getaffinity(0))
    contenders = {  # the most interesting first
        "128 async": contender(128, *work),
        "128 async bf16": contender(128, *work, *half),
        "128 async bf16 compiled": contender(128, *work, *half, *compiled),
        f"128 on {cores} processes, gloo": contender(128, nproc=cores),
        f"128 on {cores // 4 or 1} processes, async, gloo": contender(128, *work, nproc=cores // 4 or 1),
        "256 async bf16": contender(256, *work, *half),
        "64 async": contender(64, *work),
        "8 sync": contender(8),
        "8 async": contender(8, *work),
        "8 async compiled": contender(8, *work, *compiled),
        "128 async, nccl": contender(128, *work, "--backend", "nccl", nproc=1),
        "32 async": contender(32, *work),
        "128 sync": contender(128),
        "256 async": contender(256, *work),
        "16 on 2 processes, gloo": contender(16, nproc=2),
    }
    measured: dict[str, common.Measured] = {}
    for name, measure in contenders.items():
        if time.monotonic() > deadline:
            skipped.append(f"{name}: no time left")
            continue
        try:
            measured |= common.in_turns({name: measure}, 1)
        except SystemExit as failure:
            skipped.append(f"{name}: {failure}")
    if measured:
        title = f"PPO on {args.env_id}, {torch.cuda.get_device_name()}"
        common.report("gpu", title, "steps/s", measured, next(iter(measured)), args.out, args)
    for line in skipped:
        print(f"skipped: {line}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
