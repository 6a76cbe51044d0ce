"""Curves and scores of runs: the numbers, and the pictures made of them."""

import contextlib
import importlib.util
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cleanrl_utils.config import Fault, UsageError
from cleanrl_utils.events import LENGTH, RETURN, Run, Series
from cleanrl_utils.runs import whole_file
from cleanrl_utils.scores import human_normalized

LAST = 100  # games of a run whose mean is its score, CleanRL's convention
BINS = 50  # of the longest run, before their width is rounded
CONFIDENCE, RESAMPLES = 95, 2000  # of bootstrap intervals


# === Numbers ==========================================================================================================
@dataclass(frozen=True)
class Group:
    """The seeds of one experiment on one environment."""

    env_id: str
    exp_name: str
    runs: list[Run]


def group_runs(runs: list[Run]) -> list[Group]:
    """The runs by (env_id, exp_name), by game, in the order of the names; a group's runs by seed."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.game, run.env_id, run.exp_name, run.seed or 0, run.name)):
        found.setdefault((run.env_id, run.exp_name), []).append(run)
    return [Group(*key, members) for key, members in found.items()]


def by_game(groups: list[Group]) -> dict[str, list[Group]]:
    """The groups of each game."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.runs[0].game, []).append(group)
    return found


def score(run: Run, until: float = math.inf) -> float:
    """Mean return of the last 100 games to that step; of Stable-Baselines3, the last of its means over 100 games."""
    returns = run.returns.values[run.returns.steps <= until][-1 if run.of_means else -LAST :]
    return float(returns.mean()) if len(returns) else math.nan


def nice(x: float) -> float:
    """1, 2 or 5 times a power of ten, the next above x."""
    power = 10.0 ** math.floor(math.log10(x))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= x * (1 - 1e-9))


def binned(x: np.ndarray, values: np.ndarray, width: float, bins: int) -> np.ndarray:
    """Means of the values whose x is in (i * width, (i + 1) * width], for i < bins; NaN where there are none.

    x, values: (n,), x not negative; returns (bins,). Values that are not finite are left out.
    """
    known = np.isfinite(values) & np.isfinite(x)
    index = np.clip(np.ceil(x[known] / width).astype(int) - 1, 0, None)
    index, inside = index[index < bins], index < bins
    count = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.bincount(index, values[known][inside], minlength=bins) / count)


@dataclass(frozen=True)
class Curve:
    """A tag of one group over bins. x, mean, low, high: (bins,); runs: (runs, bins); NaN where there is nothing."""

    x: np.ndarray  # the bins' middles
    runs: np.ndarray
    mean: np.ndarray  # where all runs have been
    low: np.ndarray
    high: np.ndarray


def curve(series: list[Series], axis: str, width: float) -> Curve:
    """The curve of several runs' series over `axis`, "steps" or "seconds", in bins of that width.

    A bin in which no game of a run ended, between two in which some did, gets the straight line between them. A run's
    last bin counts from the half on: a few games, the short ones, would be a spike. The mean over the runs, and its
    bootstrap interval, end where the first run ends.
    """
    xs = [np.asarray(getattr(s, axis), float) for s in series]
    ends = [max(1, math.floor(np.nanmax(x) / width + 0.5)) if np.isfinite(x).any() else 1 for x in xs]
    bins = max(ends)
    rows = np.array([binned(x, s.values, width, bins) for x, s in zip(xs, series, strict=True)])
    for row, end in zip(rows, ends, strict=True):
        row[end:] = np.nan
        known = np.flatnonzero(np.isfinite(row))
        if len(known):
            between = np.arange(known[0], known[-1] + 1)
            row[between] = np.interp(between, known, row[known])
    low, high = bootstrap(rows)
    return Curve((np.arange(bins) + 0.5) * width, rows, rows.mean(0), low, high)


def bootstrap(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % percentile interval of the mean over the first axis, runs being drawn with replacement.

    rows: (runs, n); returns two (n,), NaN where a run has no value or there is only one run. Up to 4 runs all draws
    are enumerated, so that the interval is exact. One game is one stratum: this is the stratified bootstrap of
    Agarwal et al. 2021 (https://arxiv.org/abs/2108.13264) for a single task.
    """
    n = len(rows)
    if n == 1:
        return np.full(rows.shape[1], np.nan), np.full(rows.shape[1], np.nan)
    if n <= 4:
        draws = np.stack(np.meshgrid(*[np.arange(n)] * n), -1).reshape(-1, n)
    else:
        draws = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    tail = (100 - CONFIDENCE) / 2
    low, high = np.percentile(rows[draws].mean(1), [tail, 100 - tail], axis=0, method="inverted_cdf")
    return low, high


def bin_widths(groups: list[Group], window: int | None) -> tuple[float, float]:
    """(steps, seconds) of a bin for the runs of one game: a fiftieth of the longest run, rounded up."""
    runs = [run for group in groups for run in group.runs]
    steps = max((run.steps for run in runs), default=0) or 1
    seconds = max((run.seconds for run in runs if run.seconds > 0), default=math.nan)
    width = float(window or max(1.0, nice(steps / BINS)))
    if steps / width > 5000:
        raise UsageError(f"--window {window}: cuts the {steps:,} steps of {runs[0].game} in more than 5000 pieces")
    unit = _unit(groups, "seconds")[0]
    return width, unit * nice(seconds / unit * width / steps) if seconds > 0 else math.nan


# === Scores over games ================================================================================================
def score_matrices(groups: list[Group]) -> tuple[dict[str, np.ndarray], list[str], list[str]]:
    """({experiment: human-normalised scores (runs, games)}, the games, lines on what was left out).

    The games are those of the experiment that has most of them. Experiments that lack one are left out, and runs of a
    game beyond the number that every game has.
    """
    table: dict[str, dict[str, list[float]]] = {}
    for group in groups:
        scores = [human_normalized(group.env_id, score(run)) for run in group.runs]
        kept = [s for s in scores if s is not None and math.isfinite(s)]
        if kept:
            table.setdefault(group.exp_name, {}).setdefault(group.runs[0].game, []).extend(kept)
    played: list[list[str]] = [sorted(by_game) for by_game in table.values()]
    games = max(played, key=len, default=[])
    matrices: dict[str, np.ndarray] = {}
    notes = []
    for experiment, by_game in table.items():
        missing = [game for game in games if game not in by_game]
        if missing:
            notes.append(f"{experiment} has no score of {', '.join(missing)} and is left out here")
            continue
        runs = min(len(by_game[game]) for game in games)
        if any(len(by_game[game]) > runs for game in games):
            notes.append(f"{experiment}: the first {runs} run{'s' * (runs > 1)} of each game are used here")
        matrices[experiment] = np.array([by_game[game][:runs] for game in games]).T
    return matrices, games, notes


def aggregates(matrices: Mapping[str, np.ndarray], taus: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of each experiment: [IQM, optimality gap] with intervals (2, 2), and the performance profile at `taus`.

    Returns ({experiment: (points (2,), intervals (2, 2): low and high)}, {experiment: (profile, intervals)}), by
    rliable (Agarwal et al. 2021), 95 % stratified bootstrap.
    """
    try:
        from rliable import library, metrics
    except Exception as error:  # its dependency arch fails on pandas 3 with a TypeError
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Fault(
            f"no aggregates, rliable can't be imported ({line}): pip install 'cleanrl-distributed[report]'"
        ) from None

    def both(scores: np.ndarray) -> np.ndarray:
        return np.array([metrics.aggregate_iqm(scores), metrics.aggregate_optimality_gap(scores)])

    np.random.seed(0)  # rliable's resampling draws from numpy's global generator
    points, intervals = library.get_interval_estimates(dict(matrices), both, reps=RESAMPLES)
    profiles, bands = library.create_performance_profile(dict(matrices), taus, reps=RESAMPLES)
    return (
        {name: (points[name], intervals[name]) for name in matrices},
        {name: (profiles[name], bands[name]) for name in matrices},
    )


# === Pictures =========================================================================================================
@dataclass(frozen=True)
class Theme:
    """Colours of a picture. The lines' are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which people with
    colour blindness tell apart, in the order and brightness that stand out from the background."""

    paper: str
    ink: str
    faint: str
    lines: tuple[str, ...]


LIGHT = Theme("#ffffff", "#24292f", "#d5d9de", ("#0072B2", "#D55E00", "#009E73", "#AA5588", "#8A6D00", "#4A5560"))
DARK = Theme("#16191d", "#dfe3e8", "#3a4048", ("#56B4E9", "#E69F00", "#2BC49A", "#E58FBC", "#F0E442", "#B4BCC6"))


def require_matplotlib() -> None:
    """Usage error where the pictures can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("the pictures need matplotlib: pip install 'cleanrl-distributed[report]'")


@contextlib.contextmanager
def picture(path: str, theme: Theme, width: float, height: float, dpi: int = 160, **grid: Any) -> Iterator[Any]:
    """The axes of a figure that is written to `path` at the end. Sizes in inches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from cycler import cycler
    from PIL import Image

    style: Any = {
        "text.parse_math": False,  # names are names
        "font.size": 10,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.8,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "axes.prop_cycle": cycler(color=theme.lines),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.paper),
        **dict.fromkeys(("grid.color", "axes.edgecolor"), theme.faint),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), theme.ink),
    }
    with matplotlib.rc_context(style):
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained", **grid)
        try:
            yield axes
            drawn = io.BytesIO()
            figure.savefig(drawn, dpi=dpi)
            with Image.open(drawn) as image, whole_file(path, "wb") as file:  # a quarter of the size
                image.convert("RGB").quantize(128).save(file, "PNG", optimize=True)
        finally:
            plt.close(figure)


def amount(x: float, _position: object = None) -> str:
    """A number of steps in words of an axis: 500 k, 1.5 M."""
    for unit, size in ((" M", 1e6), (" k", 1e3)):
        if abs(x) >= size:
            return f"{x / size:.3g}{unit}"
    return f"{x:g}"


def label(group: Group, groups: list[Group]) -> str:
    """The experiment's name; with the environment's where one game is played in several of them."""
    several = len({g.env_id for g in groups}) > 1
    return f"{group.exp_name} ({group.env_id})" if several else group.exp_name


def draw_curves(path: str, groups: list[Group], axis: str, width: float, theme: Theme) -> None:
    """One game's returns: a thin line a run, a thick one for each experiment's mean, with its bootstrap interval.

    axis: "steps", or "seconds" of running; width of its bins.
    """
    unit, name = _unit(groups, axis)
    with picture(path, theme, 5.0, 3.2) as ax:
        _plot(ax, groups, RETURN, axis, width, unit, theme)
        bins = (
            f"{amount(width)} steps"
            if axis == "steps"
            else f"{width / unit:.3g} {name if width != unit else name.rstrip('s')}"
        )
        ax.set_title(f"{groups[0].runs[0].game}: mean of the games in bins of {bins}")
        ax.set(ylabel="episodic return", xlabel="environment steps" if axis == "steps" else f"{name} of running")
        if ax.get_legend_handles_labels()[0]:
            ax.figure.legend(loc="outside lower left", handlelength=1.5)


PANELS = {
    "losses/value_loss": "value loss",
    "losses/policy_loss": "policy loss",
    "losses/entropy": "entropy of the policy",
    "losses/approx_kl": "approximate KL of an update",
    "losses/clipfrac": "share of clipped ratios",
    "losses/explained_variance": "explained variance",
    LENGTH: "episodic length",
    "charts/SPS": "steps per second",
}


def draw_losses(path: str, groups: list[Group], width: float, theme: Theme) -> None:
    """What else was logged of one game, over steps, in the bins of the returns' curve."""
    with picture(path, theme, 7.4, 8.2, 120, nrows=4, ncols=2, sharex=True) as axes:
        for ax, (tag, name) in zip(axes.flat, PANELS.items(), strict=True):
            _plot(ax, groups, tag, "steps", width, 1.0, theme)
            ax.set_title(name)
            ax.locator_params(axis="y", nbins=4)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        axes.flat[0].figure.legend(handles, labels, loc="outside lower left", handlelength=1.5)


def draw_run(path: str, run: Run, width: float, theme: Theme = LIGHT) -> None:
    """One run: a dot for each game, and the mean of the games in bins."""
    with picture(path, theme, 7.0, 3.4) as ax:
        c = curve([run.returns], "steps", width)
        ax.plot(run.returns.steps, run.returns.values, ".", markersize=2, alpha=0.35, label="one game")
        ax.plot(c.x, c.mean, label=f"mean of the games in bins of {amount(width)} steps")
        ax.set(ylabel="episodic return", xlabel="environment steps", title=run.name)
        ax.xaxis.set_major_formatter(amount)
        ax.figure.legend(loc="outside lower left", ncols=2, handlelength=1.5)


def draw_aggregates(path: str, estimates: Mapping[str, Any], theme: Theme) -> None:
    """Interquartile mean and optimality gap of each experiment, of `aggregates`."""
    names = list(estimates)
    with picture(path, theme, 5.0, max(3.2, 1.4 + 0.6 * len(names)), nrows=2) as axes:
        titles = ("interquartile mean (more is better)", "optimality gap (less is better)")
        for ax, column, title in zip(axes, (0, 1), titles, strict=True):
            for row, name in enumerate(names):
                point, interval = estimates[name]
                low, high = interval[:, column]
                colour = theme.lines[row % len(theme.lines)]
                ax.barh(row, high - low, 0.5, low, color=colour, alpha=0.45)
                ax.plot([point[column]] * 2, [row - 0.3, row + 0.3], color=colour, linewidth=2.5)
            ax.set(title=title, yticks=range(len(names)), ylim=(len(names) - 0.4, -0.6))
            ax.set_yticklabels(names)
            ax.grid(visible=False, axis="y")
            ax.margins(x=0.08)
        axes[0].figure.supxlabel("human-normalised score", fontsize=10)


def draw_profile(path: str, profiles: Mapping[str, Any], taus: np.ndarray, theme: Theme) -> None:
    """Performance profile of each experiment, of `aggregates`."""
    with picture(path, theme, 5.0, 3.2) as ax:
        for name, (profile, (low, high)) in profiles.items():
            (line,) = ax.plot(taus, profile, label=name)
            ax.fill_between(taus, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
        ax.set(xlabel="human-normalised score τ", ylabel="share of runs above τ", ylim=(-0.02, 1.02))
        ax.figure.legend(loc="outside lower left", handlelength=1.5)


def _unit(groups: list[Group], axis: str) -> tuple[float, str]:
    """A unit of the axis, and its name: of the time in which the longest run is read best."""
    seconds = max((run.seconds for group in groups for run in group.runs if run.seconds > 0), default=0.0)
    if axis == "steps":
        return 1.0, "steps"
    return (3600.0, "hours") if seconds >= 7200 else (60.0, "minutes") if seconds >= 120 else (1.0, "seconds")


def _plot(ax: Any, groups: list[Group], tag: str, axis: str, width: float, unit: float, theme: Theme) -> None:
    for number, group in enumerate(groups):
        series = [run.series[tag] for run in group.runs if tag in run.series]
        series = [s for s in series if np.isfinite(getattr(s, axis)).any()]
        if not series:
            continue
        c, colour = curve(series, axis, width), theme.lines[number % len(theme.lines)]
        if len(series) > 1:
            for row in c.runs:
                ax.plot(c.x / unit, row, color=colour, alpha=0.45, linewidth=0.8)
            ax.fill_between(c.x / unit, c.low, c.high, color=colour, alpha=0.18, linewidth=0)
        alone = "o" if np.isfinite(c.mean).sum() == 1 else None  # a line of one point would not be seen
        name = f"{label(group, groups)} · {len(series)} seed{'s' * (len(series) > 1)}"
        ax.plot(c.x / unit, c.mean, color=colour, label=name, marker=alone)
    if axis == "steps":
        ax.xaxis.set_major_formatter(amount)
    ax.set_xlim(left=0)
