"""The step at which 1 process x 16 environments and 2 x 8 first act differently: python results/horizon.py [FLAGS]

FLAGS are those of ppo_atari_multigpu.py, such as --env-id PongNoFrameskip-v4; 20 iterations of the defaults if not set.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc_per_node=2"]
FLAGS = ["--total-num-envs", "16", "--total-timesteps", "40960", "--num-threads", "1"]


def record(folder: str, name: str, launcher: list[str], flags: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """A run's actions, (steps, environments), and its weights at the start of each iteration and at the end."""
    script = [str(ROOT / "tests" / "recorded_run.py"), str(ROOT / "ppo_atari_multigpu.py"), name]
    subprocess.run([sys.executable, *launcher, *script, *FLAGS, *flags], cwd=folder, check=True)
    files = [np.load(path) for path in sorted(Path(folder, name).glob("rank*.npz"))]
    return np.concatenate([file["actions"] for file in files], axis=1), files[0]["params"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        actions, params = record(folder, "1x16", [], sys.argv[1:])
        other_actions, other_params = record(folder, "2x8", TORCHRUN, sys.argv[1:])
    different = np.flatnonzero((actions != other_actions).any(axis=1))
    apart = np.abs(params - other_params).max(axis=1)
    steps = len(actions) // (len(params) - 1)
    if len(different):
        print(f"the first different action: step {different[0]}, in iteration {different[0] // steps + 1}")
    else:
        print(f"no different action in {len(actions)} steps")
    print("largest difference of a weight after each iteration:", " ".join(f"{x:.1e}" for x in apart[1:]))
