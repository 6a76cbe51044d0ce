"""From event folders to one page with curves, scores, videos and commands: python -m cleanrl_utils.report --help"""

import base64
import datetime
import glob
import html
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Annotated

import numpy as np
import tyro

from cleanrl_utils import curves, studies
from cleanrl_utils.config import Fault, NonNegative, Positive, UsageError
from cleanrl_utils.curves import DARK, LIGHT, Group, Theme, amount, group_runs, score
from cleanrl_utils.events import Run, find_runs
from cleanrl_utils.runs import tool
from cleanrl_utils.scores import CLEANRL_PPO, RANDOM_AND_HUMAN, game_name, human_normalized
from cleanrl_utils.studies import Study


@dataclass(frozen=True)
class Args:
    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH")] = ("runs",)
    """folders that are searched for runs: event folders (also of CleanRL and Stable-Baselines3), kept results, and
    studies of cleanrl_utils.tune"""
    out: str = "report"
    """folder for index.html, which needs nothing beside it, scores.md and the pictures"""
    only: str = "*"
    """only runs and studies whose name matches this pattern, for example 'Pong*'"""
    title: str = "PPO on Atari"
    """title of the page"""
    window: Positive[int] | None = None
    """steps over which returns are averaged; a fiftieth of the game's longest run, rounded up, if not set"""
    video_mb: NonNegative[float] = 20.0
    """MB of videos that the page may hold: first what evaluations recorded, then each run's latest game, then its first
    one"""


BEST = 10  # trials of a study in its table
NONE, MINUS = "\u2013", "\u2212"  # in a table's cell
DERIVED = (  # CleanRL logs these among its arguments, and computes them
    "batch_size", "minibatch_size", "num_iterations", "local_batch_size", "local_minibatch_size", "world_size",
)  # fmt: skip
SOURCES = (
    f"Score: mean return of a run's last {curves.LAST} training games, or of all if there are fewer (of"
    " Stable-Baselines3, its last mean of 100);"
    " over seeds, mean ± standard deviation of a sample, or each by itself where one has run for more than twice the"
    " steps of another. Evaluation: whole games of the trained agent, where"
    " cleanrl_utils.evaluate has played them, with the numbers of games and of seeds."
    " Human-normalised: 0 is random play, 1 the human of Wang et al. 2016"
    " (arXiv 1511.06581, 30 no-op starts). CleanRL: its script of the same name, else its ppo_atari, mean ± standard"
    " deviation of 3 seeds after 10 million steps (https://docs.cleanrl.dev/rl-algorithms/ppo/). A step is one action"
    " of one environment, 4 emulator frames."
)


# === Tables ===========================================================================================================
def number(x: float, digits: int) -> str:
    return f"{round(x, digits) + 0.0:,.{digits}f}".replace("-", MINUS)  # + 0.0: no -0.00


def spread(values: Sequence[float], alike: bool = True) -> str:
    """Mean ± standard deviation (n - 1) of the finite values; without ± for a single one. Not alike: each by itself."""
    if not alike:
        return ", ".join(spread([value]) for value in values)
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return NONE
    mean = float(np.mean(known))
    digits = 2 if abs(mean) < 1000 else 1
    deviation = f" ± {number(float(np.std(known, ddof=1)), digits)}" if len(known) > 1 else ""
    return number(mean, digits) + deviation


def reached(runs: list[Run]) -> str:
    steps = sorted(run.steps for run in runs)
    return amount(steps[0]) if amount(steps[0]) == amount(steps[-1]) else f"{amount(steps[0])} to {amount(steps[-1])}"


def score_table(groups: list[Group]) -> list[list[str]]:
    """The scores of each group beside published ones; the first row is the head."""
    rows = [["Game", "Experiment", "Score", "Human-normalised", "Seeds", "Steps", "Evaluation"]]
    rows[0] += ["CleanRL, 10 M steps", "Random, human"]
    for group in groups:
        game, scores = game_name(group.env_id), [score(run) for run in group.runs]
        alike = max(run.steps for run in group.runs) <= 2 * min(run.steps for run in group.runs)
        normalised = [n for s in scores if (n := human_normalized(group.env_id, s)) is not None]
        evaluated = [float(run.evaluation.get("mean", math.nan)) for run in group.runs if run.evaluation]
        games = sum(int(run.evaluation.get("games", 0)) for run in group.runs if run.evaluation)
        played = f" ({games} games, {len(evaluated)} seed{'s' * (len(evaluated) > 1)})" if evaluated else ""
        published = CLEANRL_PPO.get(group.exp_name, CLEANRL_PPO["ppo_atari"]).get(game)
        extremes = RANDOM_AND_HUMAN.get(game)
        rows.append([
            group.env_id, group.exp_name, spread(scores, alike), spread(normalised, alike),
            str(len(group.runs)), reached(group.runs), f"{spread(evaluated)}{played}",
            " ± ".join(number(x, 2 if published[0] < 1000 else 1) for x in published) if published else NONE,
            ", ".join(number(x, 1) for x in extremes) if extremes else NONE,
        ])  # fmt: skip
    return rows


def same_step_table(groups: list[Group]) -> list[list[str]]:
    """The scores of a game's experiments at the step where the shortest run ended; nothing to compare gives []."""
    steps = min(run.steps for group in groups for run in group.runs)
    if len(groups) == 1 or all(reached(group.runs) == amount(steps) for group in groups):
        return []
    rows = [["Experiment", f"Score at {amount(steps)} steps", "Of each run"]]
    for group in groups:
        scores = [score(run, steps) for run in group.runs]
        rows.append([curves.label(group, groups), spread(scores), ", ".join(spread([s]) for s in scores)])
    return rows


def run_table(groups: list[Group]) -> list[list[str]]:
    rows = [["Run", "Seed", "Steps", "of", "Games", "Score", "Steps/s", "Running for", "Started"]]
    for run in (run for group in groups for run in group.runs):
        total, seconds = run.params.get("total_timesteps", ""), run.seconds
        clock = (
            f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02}:{int(seconds % 60):02}" if seconds >= 0 else NONE
        )
        rows.append([
            run.name, NONE if run.seed is None else str(run.seed), f"{run.steps:,}",
            f"{int(total):,}" if total.isdigit() else NONE,
            NONE if run.of_means else f"{len(run.returns.values):,}", spread([score(run)]),
            f"{run.steps / seconds:,.0f}" if seconds > 0 else NONE, clock, day(run),
        ])  # fmt: skip
    return rows


def day(run: Run) -> str:
    date = run.facts.get("date")
    if isinstance(date, (int, float)):
        return datetime.datetime.fromtimestamp(date, datetime.timezone.utc).strftime("%Y-%m-%d")
    return str(date or NONE)


def markdown_table(rows: list[list[str]], numbers_from: int = 2) -> str:
    rule = ["---" if column < numbers_from else "---:" for column in range(len(rows[0]))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [rows[0], rule, *rows[1:]]
    )


# === Commands =========================================================================================================
def command(run: Run) -> str:
    """The command that made a run: as it was logged, else rebuilt from all logged arguments; "" if there are none."""
    if "command" in run.facts:
        return str(run.facts["command"])
    params = dict(run.params)
    if not params:
        return ""
    processes = params.get("world_size", "1")
    if "num_iterations" in params:  # CleanRL's
        for name in DERIVED + (("num_envs",) if "local_num_envs" in params else ()):
            params.pop(name, None)
    for whole, own in (("total_num_envs", "num_envs"), ("batch_size", "num_steps")):
        if params.get(whole, "None") != "None":
            params.pop(own, None)  # the flags exclude each other
    words = ["python"] if processes == "1" else ["torchrun", "--standalone", f"--nproc_per_node={processes}"]
    words.append(f"{run.exp_name}.py")
    for name, value in params.items():
        flag = name.replace("_", "-")
        if value in ("True", "False"):
            words.append(f"--{flag}" if value == "True" else f"--no-{flag}")
        elif value not in ("None", "()", "[]"):
            listed = re.fullmatch(r"[(\[](.*?),?[)\]]", value)
            words += [f"--{flag}", *(listed[1].split(", ") if listed else [value])]
    return shlex.join(words)


def commands(groups: list[Group]) -> list[tuple[str, str, str]]:
    """(whose, command, circumstances) of the runs, those that differ in their seed only together."""
    found: dict[str, list[Run]] = {}
    for run in (run for group in groups for run in group.runs):
        if line := command(run):
            found.setdefault(re.sub(r"--(seed|run-name|track|capture-video)([= ][^-]\S*)?", "", line), []).append(run)
    rows = []
    for runs in found.values():
        seeds = ", ".join(str(run.seed) for run in runs)
        whose = f"{runs[0].exp_name}, {runs[0].env_id}, seed{'s' * (len(runs) > 1)} {seeds}"
        facts = {k: v for k, v in runs[0].facts.items() if k not in ("command", "date")}
        rows.append((whose, command(runs[0]), " · ".join(f"{key} {value}" for key, value in facts.items())))
    return rows


# === Videos ===========================================================================================================
def find_videos(run: Run) -> list[str]:
    """The run's videos, in the order of their worth: of an evaluation, its latest game, its first one."""
    parts = os.path.abspath(run.folder).split(os.sep)
    evaluations = sorted(glob.glob(f"{glob.escape(run.folder)}/*.mp4"))
    for i in range(len(parts) - 1, 0, -1):  # runs/NAME has its videos in videos/NAME
        folder = os.sep.join([*parts[: i - 1], "videos", *parts[i:]])
        games = glob.glob(f"{glob.escape(folder)}/*.mp4")
        if games:
            games.sort(key=lambda path: [int(n) for n in re.findall(r"\d+", os.path.basename(path)[:-4])])
            return [*evaluations, games[-1], *games[:1][: len(games) - 1]]
    return evaluations


def choose_videos(runs: list[Run], megabytes: float) -> tuple[dict[str, list[str]], str]:
    """({run's folder: its videos on the page}, a line on those that were left out), within the cap on their size."""
    ranked = sorted(
        (rank, order, run.folder, path)
        for order, run in enumerate(runs)
        for rank, path in enumerate(find_videos(run))
        if os.path.getsize(path)
    )
    chosen: dict[str, list[str]] = {run.folder: [] for run in runs}
    dropped: list[str] = []
    left = megabytes * 1e6
    for _, _, folder, path in ranked:
        size = os.path.getsize(path)
        (chosen[folder] if size <= left else dropped).append(path)
        left -= size if size <= left else 0
    mb = sum(map(os.path.getsize, dropped)) / 1e6
    line = f"Left out, over the cap of {megabytes:g} MB: {len(dropped)} videos of {mb:.1f} MB: {', '.join(dropped)}"
    return chosen, line if dropped else ""


# === The page =========================================================================================================
CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #24292f; --soft: #57606a; --rule: #d5d9de; --tint: #f5f6f8;
  --link: #0b5cad; --c0: #0072B2; --c1: #D55E00; --c2: #009E73; --c3: #AA5588; --c4: #8A6D00; --c5: #4A5560; }
@media (prefers-color-scheme: dark) { :root { --paper: #16191d; --ink: #dfe3e8; --soft: #9aa4af; --rule: #3a4048;
  --tint: #1e2227; --link: #7cc4f5; --c0: #56B4E9; --c1: #E69F00; --c2: #2BC49A; --c3: #E58FBC; --c4: #F0E442;
  --c5: #B4BCC6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem clamp(1rem, 3vw, 2.5rem) 4rem; max-width: 80rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; letter-spacing: -0.01em; font-weight: 650; }
h2 { font-size: 1.3rem; margin: 3.2rem 0 0.9rem; padding-top: 1rem; border-top: 1px solid var(--rule);
  font-weight: 650; }
h3 { font-size: 1rem; margin: 1.9rem 0 0.5rem; font-weight: 650; }
p { margin: 0.5rem 0; max-width: 46rem; } a { color: var(--link); }
.lead, .note, figcaption { color: var(--soft); } .note, figcaption { font-size: 0.85rem; }
.note { max-width: 60rem; overflow-wrap: anywhere; }
nav { margin-top: 0.8rem; display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; }
.scroll { overflow-x: auto; margin: 0.6rem 0; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 0.4rem 0 0.4rem 1rem; text-align: right; white-space: nowrap; }
th { white-space: normal; font-weight: 600; color: var(--soft); vertical-align: bottom;
  border-bottom: 1px solid var(--ink); }
td { border-bottom: 1px solid var(--rule); }
th.t, td.t { text-align: left; } td.t { white-space: normal; overflow-wrap: anywhere; min-width: 9.5rem; }
 th:first-child, td:first-child { padding-left: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; } img { display: block; width: 100%; height: auto; }
.wide img { min-width: 36rem; max-width: 56rem; }
.videos { display: flex; flex-wrap: wrap; gap: 1rem 1.25rem; }
.videos figure { width: 10rem; overflow-wrap: anywhere; }
video { width: 10rem; aspect-ratio: 160 / 210; background: #000; border-radius: 3px; image-rendering: pixelated; }
th span { white-space: nowrap; }
.bar { display: flex; height: 0.8rem; min-width: 12rem; gap: 1px; } .bar i { border-radius: 1px; }
.key { display: inline-block; width: 0.65rem; height: 0.65rem; margin-right: 0.4rem; border-radius: 1px; }
.b0 { background: var(--c0); } .b1 { background: var(--c1); } .b2 { background: var(--c2); }
.b3 { background: var(--c3); } .b4 { background: var(--c4); } .b5 { background: var(--c5); }
pre { background: var(--tint); padding: 0.75rem 1rem; margin: 0.3rem 0; font-size: 0.8rem; line-height: 1.5;
  white-space: pre-wrap; overflow-wrap: anywhere; border-radius: 4px;
  font-family: ui-monospace, SFMono-Regular, "DejaVu Sans Mono", monospace; }
summary { cursor: pointer; margin: 1.4rem 0 0.4rem; font-weight: 650; }
.problems { border-left: 3px solid var(--c1); padding: 0.1rem 0 0.1rem 1rem; margin: 1.5rem 0; font-size: 0.875rem; }
.problems ul { padding-left: 1.1rem; margin: 0.4rem 0; overflow-wrap: anywhere; }
footer { margin-top: 3.5rem; border-top: 1px solid var(--rule); padding-top: 0.7rem; }
"""


def table(rows: list[list[str]], numbers_from: int = 2, raw: bool = False) -> str:
    """An HTML table; the first row is its head, the first `numbers_from` columns are text. raw: cells are HTML."""

    def cells(row: list[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=t' * (i < numbers_from)}>{cell if raw else html.escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>\n" for row in rows[1:])
    head = f"<thead><tr>{cells(rows[0], 'th')}</tr></thead>"
    return f"<div class=scroll tabindex=0><table>{head}<tbody>{body}</tbody></table></div>"


def data_uri(path: str, kind: str) -> str:
    with open(path, "rb") as file:
        return f"data:{kind};base64,{base64.b64encode(file.read()).decode()}"


class Pictures:
    """Writes each picture for light paper to the folder, and gives the page both, for light and for dark."""

    def __init__(self, out: str):
        self.out = out

    def add(self, name: str, alt: str, draw: Callable[[str, Theme], None]) -> str:
        path = os.path.join(self.out, f"{name}.png")
        draw(path, LIGHT)
        with tempfile.TemporaryDirectory() as folder:
            draw(f"{folder}/dark.png", DARK)
            dark = data_uri(f"{folder}/dark.png", "image/png")
        source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        image = f'<img src="{data_uri(path, "image/png")}" alt="{html.escape(alt)}">'
        return f"<figure><picture>{source}{image}</picture></figure>"


def slug(name: str) -> str:
    return re.sub(r"\W+", "-", name).strip("-")


def time_shares(groups: list[Group]) -> str:
    """Where an iteration's time went: a bar and the shares of each experiment."""
    shares: dict[str, dict[str, float]] = {}
    for group in groups:
        means: dict[str, list[float]] = {}
        for run in group.runs:
            for tag, series in run.series.items():
                if tag.startswith("time/") and np.isfinite(series.values).any():
                    means.setdefault(tag[5:], []).append(float(series.values[np.isfinite(series.values)].mean()))
        if means:
            shares[curves.label(group, groups)] = {part: float(np.mean(values)) for part, values in means.items()}
    names = list(dict.fromkeys(part for parts in shares.values() for part in parts))
    if not names:
        return ""
    rows = [
        [
            "Experiment",
            "",
            *(f"<span><i class='key b{i % 6}'></i>{html.escape(name)}</span>" for i, name in enumerate(names)),
        ]
    ]
    for label, parts in shares.items():
        width = [(i, 100 * parts.get(name, 0.0)) for i, name in enumerate(names)]
        bar = "".join(f"<i class=b{i % 6} style='width:{share:.2f}%'></i>" for i, share in width)
        numbers = [f"{100 * parts[name]:.1f} %" if name in parts else NONE for name in names]
        rows.append([html.escape(label), f"<div class=bar>{bar}</div>", *numbers])
    return f"<h3>Where the time goes</h3>{table(rows, 2, raw=True)}"


def game_section(groups: list[Group], pictures: Pictures, videos: dict[str, list[str]], window: int | None) -> str:
    """The page's part about one game."""
    game, runs = groups[0].runs[0].game, [run for group in groups for run in group.runs]
    steps, seconds = curves.bin_widths(groups, window)
    names, parts = (
        ", ".join(dict.fromkeys(group.exp_name for group in groups)),
        [f"<h2 id={slug(game)}>{html.escape(game)}</h2>"],
    )
    if any(len(run.returns.steps) for run in runs):
        figures = []
        for axis, width in (("steps", steps), ("seconds", seconds)):
            if width > 0:
                alt = f"{game}: episodic return of {names} over {'environment steps' if axis == 'steps' else 'time'}"
                name = f"{slug(game)}-{'steps' if axis == 'steps' else 'time'}"
                figures.append(
                    pictures.add(name, alt, lambda p, t, a=axis, w=width: curves.draw_curves(p, groups, a, w, t))  # type: ignore[misc]
                )
        parts.append(f"<div class=pair>{''.join(figures)}</div>")
        if len(runs) > len(groups):
            parts.append(
                "<p class=note>Thin lines are runs, thick ones the mean over seeds, up to the end of the shortest run;"
                f" the band is its {curves.CONFIDENCE} % bootstrap interval.</p>"
            )
    else:
        parts.append("<p class=note>No game has ended yet.</p>")
    parts += [table(rows, 1) for rows in (same_step_table(groups), run_table(groups)) if rows]
    parts.append(time_shares(groups))
    figures = []
    for run in runs:
        for path in videos[run.folder]:
            video = data_uri(path, "video/mp4")
            caption = f"{run.exp_name}, seed {run.seed}: {os.path.basename(path).removesuffix('.mp4')}"
            figures.append(
                f'<figure><video controls muted loop playsinline preload=metadata src="{video}"></video>'
                f"<figcaption>{html.escape(caption)}</figcaption></figure>"
            )
    if figures:
        parts.append(f"<h3>Videos</h3><div class=videos>{''.join(figures)}</div>")
    if any(tag in run.series for run in runs for tag in curves.PANELS):
        alt = f"{game}: losses, episode lengths and speed of {names} over environment steps"
        image = pictures.add(f"{slug(game)}-losses", alt, lambda p, t: curves.draw_losses(p, groups, steps, t))
        title = f"Losses, lengths and speed, means of bins of {amount(steps)} steps"
        parts.append(f"<details><summary>{title}</summary><div class='scroll wide'>{image}</div></details>")
    lines = [
        f"<p class=note>{html.escape(whose)}</p><pre>{html.escape(line)}</pre><p class=note>{html.escape(facts)}</p>"
        for whose, line, facts in commands(groups)
    ]
    if lines:
        parts.append(f"<h3>Commands</h3>{''.join(lines)}")
    return "\n".join(parts)


def aggregate_section(groups: list[Group], pictures: Pictures) -> str:
    """Interquartile mean, optimality gap and performance profile over games, where there are two or more."""
    matrices, games, notes = curves.score_matrices(groups)
    if len(games) < 2:
        return ""
    every = np.concatenate([matrix.ravel() for matrix in matrices.values()])
    taus = np.linspace(min(0.0, float(every.min())), max(1.0, 1.05 * float(every.max())), 101)
    try:
        estimates, profiles = curves.aggregates(matrices, taus)
    except Fault as error:
        return f"<h2>Over all games</h2><p class=note>{html.escape(str(error))}</p>"
    rows = [["Experiment", "Runs per game", "Interquartile mean", "95 % interval", "Optimality gap", "95 % interval"]]
    for name, (point, (low, high)) in estimates.items():
        cells = [number(x, 3) for x in (*point, *low, *high)]
        iqm, gap, low_iqm, low_gap, high_iqm, high_gap = cells
        alone = len(matrices[name]) == 1
        pair = [NONE, NONE] if alone else [f"{low_iqm} to {high_iqm}", f"{low_gap} to {high_gap}"]
        rows.append([name, str(len(matrices[name])), iqm, pair[0], gap, pair[1]])
    bars = pictures.add(
        "aggregate", "Interquartile mean and optimality gap of each experiment, with intervals",
        lambda path, theme: curves.draw_aggregates(path, estimates, theme),
    )  # fmt: skip
    profile = pictures.add(
        "profile", "Share of runs above each human-normalised score",
        lambda path, theme: curves.draw_profile(path, profiles, taus, theme),
    )  # fmt: skip
    text = (
        f"Human-normalised scores over {', '.join(games)}, by rliable (Agarwal et al. 2021). The intervals are of 95 %,"
        f" stratified bootstrap. The optimality gap is how far the runs fall short of the human on average."
    )
    left_out = "".join(f"<p class=note>{html.escape(note)}.</p>" for note in notes)
    return (
        f"<h2>Over all games</h2><p class=note>{html.escape(text)}</p>{left_out}{table(rows, 1)}"
        f"<div class=pair>{bars}{profile}</div>"
    )


def study_section(study: Study, pictures: Pictures) -> str:
    """The page's part about a study of `cleanrl_utils.tune`."""
    over = [", ".join(study.env_ids)] * (len(study.env_ids) > 1) + [f"{study.num_seeds} seeds"] * (study.num_seeds > 1)
    text = f"{study.counts}. A trial's value is the {study.score} of a run's last {study.last_games} games"
    text += f", the mean over {' and '.join(over)}." if over else "."
    drawn = [
        pictures.add(f"{slug(study.name)}-{name}", f"{study.name}: {alt}", lambda p, t, d=draw: d(p, study, t))  # type: ignore[misc]
        for name, (alt, draw) in studies.pictures(study).items()
    ]
    parts = [
        f"<h2 id=study-{slug(study.name)}>Study {html.escape(study.name)}</h2><p>{html.escape(text)}</p>",
        f"<div class=pair>{''.join(drawn)}</div>",
    ]
    best = study.complete[:BEST]
    if best:
        names = [param.name for param in study.params]
        rows = [["Trial", "Value", *names]]
        rows += [
            [str(t.number), number(t.value or 0.0, 3), *(studies.word(t.params[name]) for name in names)] for t in best
        ]
        head = f"The best {len(best)} trials" if len(best) > 1 else "The best trial"
        parts.append(f"<h3>{head}</h3>{table(rows, 0)}<h3>The best command</h3><pre>{html.escape(study.best)}</pre>")
    parts.append(
        f"<p class=note>Runs of its trials are not among the others; python -m cleanrl_utils.report"
        f" {html.escape(shlex.quote(study.folder))}/*/ shows them.</p>"
    )
    return "\n".join(parts)


def page(args: Args, runs: list[Run], found: list[Study], notes: list[str]) -> str:
    """The page as HTML; its pictures are written to the folder `args.out` too."""
    groups, pictures = group_runs(runs), Pictures(args.out)
    games = curves.by_game(groups)
    videos, left_out = choose_videos([run for group in groups for run in group.runs], args.video_mb)
    places = {slug(game): game for game in games} | {f"study-{slug(s.name)}": f"Study {s.name}" for s in found}
    links = "".join(f"<a href=#{place}>{html.escape(name)}</a>" for place, name in places.items())
    counts = [(len(runs), "run"), (len({g.exp_name for g in groups}), "experiment"), (len(games), "game")]
    lead = ", ".join(f"{n} {what}{'s' * (n != 1)}" for n, what in counts)
    lead += f", {amount(sum(run.steps for run in runs))} environment steps in all"
    problems = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    body = [
        f"<header><h1>{html.escape(args.title)}</h1>" + f"<p class=lead>{lead}</p>" * bool(runs),
        f"<nav>{links}</nav></header>" if len(places) > 1 else "</header>",
        f"<div class=problems>Not everything could be read:<ul>{problems}</ul></div>" if notes else "",
        f"<h2>Scores</h2>{table(score_table(groups))}<p class=note>{html.escape(SOURCES)}</p>" if runs else "",
        aggregate_section(groups, pictures),
        *(f"<section>{game_section(of_game, pictures, videos, args.window)}</section>" for of_game in games.values()),
        f"<p class=note>{html.escape(left_out)}</p>" if left_out else "",
        *(f"<section>{study_section(study, pictures)}</section>" for study in found),
        f"<footer class=note>Made {now} by cleanrl_utils.report. Nothing on this page comes from elsewhere.</footer>",
    ]
    policy = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang=en>
<head>
<meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1">
<meta http-equiv=Content-Security-Policy content="{policy}">
<title>{html.escape(args.title)}</title>
<style>{CSS}</style>
</head>
<body>
{chr(10).join(part for part in body if part)}
</body>
</html>
"""


def report(args: Args) -> str:
    """Write the page, the table and the pictures; the page's path."""
    curves.require_matplotlib()
    for path in args.paths:
        if not os.path.exists(path):
            raise UsageError(f"{path}: does not exist")
    runs, notes = find_runs(args.paths, args.only)
    every = studies.find_studies(args.paths, notes)
    found = [study for study in every if fnmatch(study.name, args.only)]
    for group in group_runs(runs):
        seeds = [run.seed for run in group.runs if run.seed is not None]
        for seed in sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            notes.append(f"{group.exp_name}, {group.env_id}: {seeds.count(seed)} runs have seed {seed}")
    for note in notes:
        print(f"notice: {note}", file=sys.stderr)
    for study in every:
        shown = ": its section shows its trials, whose runs are left out"
        left_out = shown if study in found else ", whose trials' runs are left out"
        print(f"notice: {study.folder} is a study{left_out}", file=sys.stderr)
    if not runs and not found:
        chosen = "" if args.only == "*" else f" with a name like {args.only}"
        raise UsageError(f"{' '.join(args.paths)}: no run with scalars{chosen}")
    for groups in curves.by_game(group_runs(runs)).values():
        curves.bin_widths(groups, args.window)  # or a usage error, before anything is made
    try:
        os.makedirs(args.out, exist_ok=True)
        path = os.path.join(args.out, "index.html")
        text = page(args, runs, found, notes)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        if runs:
            with open(os.path.join(args.out, "scores.md"), "w", encoding="utf-8") as file:
                file.write(f"{markdown_table(score_table(group_runs(runs)))}\n\n{SOURCES}\n")
    except OSError as error:
        raise UsageError(f"--out {args.out}: {error.strerror}") from None
    return path


def report_and_say(args: Args) -> None:
    print(f"wrote {report(args)}, the page; beside it the pictures, and of runs the scores")


def main(argv: list[str]) -> int:
    return tool(report_and_say, Args, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
