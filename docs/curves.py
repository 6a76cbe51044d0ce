"""The pictures of get-started/first-run.md, from the event file of that page's run: python docs/curves.py runs/first"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

OUT = Path(__file__).parent / "curves"
LOSSES = ("entropy", "explained_variance", "approx_kl", "clipfrac", "value_loss", "policy_loss")


def axes(title: str) -> plt.Axes:
    _, ax = plt.subplots(figsize=(5.5, 2.4), dpi=110)
    ax.set(title=title, xlabel="global_step")
    ax.grid(alpha=0.3)
    return ax


def save(name: str) -> None:
    plt.tight_layout()
    plt.savefig(OUT / f"{name}.png", metadata={"Software": None})
    plt.close()


def main(run_folder: str) -> None:
    events = EventAccumulator(run_folder, size_guidance={"scalars": 0})
    events.Reload()
    points = {tag: np.array([(e.step, e.value) for e in events.Scalars(tag)]).T for tag in events.Tags()["scalars"]}
    OUT.mkdir(exist_ok=True)
    steps, returns = points["charts/episodic_return"]
    ax = axes("charts/episodic_return")
    ax.plot(steps, returns, ".", alpha=0.4, label="one game")
    n = min(50, len(returns))
    ax.plot(steps[n - 1 :], np.convolve(returns, np.ones(n) / n, mode="valid"), label=f"mean of {n} games")
    ax.legend()
    save("episodic_return")
    for name in LOSSES:
        axes(f"losses/{name}").plot(*points[f"losses/{name}"])
        save(name)
    for tag, (_, values) in points.items():
        print(f"{tag:28} first {values[0]:9.4f}  last {values[-1]:9.4f}  {len(values)} points")
    print(f"mean of the first and the last {n} games: {returns[:n].mean():.2f}, {returns[-n:].mean():.2f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
