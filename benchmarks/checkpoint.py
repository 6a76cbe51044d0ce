"""What checkpoints cost: python benchmarks/checkpoint.py [--iterations 12] [FLAGS OF THE SCRIPT ...]

Trains on Breakout with two processes of 8 environments and writes a checkpoint after every second iteration. Prints the
time of an iteration, of a checkpoint, and the share of the training time at the default interval.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ppo_atari_multigpu import Args  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=12)
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        sizes = ["--total-timesteps", str(options.iterations * 2048), "--checkpoint-every", "2", "--run-name", "run"]
        subprocess.run([*torchrun, str(ROOT / "ppo_atari_multigpu.py"), *sizes, *flags], cwd=folder, check=True)
        events = EventAccumulator(f"{folder}/runs/run", size_guidance={"scalars": 0})
        events.Reload()
        logged = events.Scalars("time/checkpoint")
        megabytes = next(Path(folder, "runs", "run").glob("*.pt")).stat().st_size / 1e6
    # The time of a checkpoint is logged with the iteration after it, from one logging to the next.
    seconds = np.diff([event.wall_time for event in logged])
    share = np.array([event.value for event in logged[1:]])
    iteration, write = np.median(seconds * (1 - share)), np.median((seconds * share)[share > 0])
    every = Args.checkpoint_every
    print(f"iteration {iteration:.2f} s, checkpoint {write:.2f} s ({megabytes:.1f} MB)")
    print(f"share of the time, one every {every} iterations: {100 * write / (every * iteration + write):.3f} %")


if __name__ == "__main__":
    main()
