"""Draw a run's returns: reads the event file of RUN_FOLDER, writes OUT.png and OUT.csv."""

import csv
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

GAMES = 100  # games of the running mean


def main(run_folder: str, out: str) -> None:
    events = EventAccumulator(run_folder, size_guidance={"scalars": 0})
    events.Reload()
    points = [(e.step, e.value) for e in events.Scalars("charts/episodic_return")]
    with open(f"{out}.csv", "w", newline="") as file:
        csv.writer(file).writerows([("global_step", "episodic_return"), *points])
    steps, returns = np.array(points).T
    n = min(GAMES, len(returns))
    mean = np.convolve(returns, np.ones(n) / n, mode="valid")
    _, ax = plt.subplots(figsize=(7, 3.5), dpi=120)
    ax.plot(steps, returns, ".", markersize=2, alpha=0.3, label="one game")
    ax.plot(steps[n - 1 :], mean, label=f"mean of {n} games")
    ax.set(xlabel="environment steps", ylabel="episodic return", title=run_folder.rstrip("/").rpartition("/")[2])
    ax.legend()
    plt.tight_layout()
    plt.savefig(f"{out}.png")
    print(f"{len(returns)} games, {int(steps[-1])} steps; mean return of the last {n} games: {mean[-1]:.2f}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or "--help" in sys.argv:
        sys.exit(f"{__doc__}\nusage: python benchmarks/curve.py RUN_FOLDER OUT")
    main(*sys.argv[1:])
