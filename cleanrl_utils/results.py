"""Results that are kept in the repository, small and rebuildable: python -m cleanrl_utils.results --help

results/NAME/run.json            how to repeat it (command, commit, ...), its evaluation; "note" in its "facts" is yours
results/NAME/games.csv.gz        step, seconds of running, episodic_return, episodic_length of every finished game
results/NAME/iterations.csv.gz   step, seconds, and the scalars of the iterations, in at most 1000 rows of means
results/NAME/curve.png, results/*.png, results/README.md    made from these
"""

import contextlib
import csv
import gzip
import io
import json
import math
import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
import tyro

from cleanrl_utils import curves, report
from cleanrl_utils.config import UsageError
from cleanrl_utils.events import LENGTH, RETURN, Run, Series, checked_evaluation, find_runs
from cleanrl_utils.runs import tool

ROWS = 1000  # of iterations.csv.gz
GAMES, ITERATIONS = "games.csv.gz", "iterations.csv.gz"


@dataclass(frozen=True)
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ()
    """run folders to keep, such as runs/NAME; none: only the page and the pictures are made anew"""
    out: str = "results"
    """folder of the kept results"""


# === Tables ===========================================================================================================
def thinned(series: Series, rows: int = ROWS) -> Series:
    """Means of as many neighbouring points as it takes for at most that many rows, each at its last step and time."""
    size = math.ceil(len(series.steps) / rows)
    ends = np.append(np.arange(size, len(series.steps), size), len(series.steps))
    starts = np.append(0, ends[:-1])
    means = np.add.reduceat(series.values, starts) / (ends - starts)
    return Series(series.steps[ends - 1], series.seconds[ends - 1], means)


def _text(value: float) -> str:
    """Shortest text of a single-precision number, which is what event files hold; empty for NaN."""
    return "" if math.isnan(value) else str(np.float32(value)).removesuffix(".0")


def _write_table(path: str, columns: dict[str, Series]) -> None:
    """A row for each step of the columns' series; of games, for each game."""
    rows: dict[tuple[int, int], dict[str, str]] = {}
    for name, series in columns.items():
        count: dict[int, int] = {}
        for step, seconds, value in zip(series.steps.tolist(), series.seconds.tolist(), series.values, strict=True):
            count[step] = count.get(step, 0) + 1  # several games may end at a step
            row = rows.setdefault((step, count[step]), {"step": str(step)})
            row.setdefault("seconds", "" if math.isnan(seconds) else f"{seconds:.1f}")
            row[name] = _text(value)
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", "seconds", *columns], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[key] for key in sorted(rows))
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:  # the same bytes for the same table
        file.write(text.getvalue().encode())


def _read_table(path: str) -> dict[str, Series]:
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {}
    for name in rows[0] if rows else ():
        filled = [row for row in rows if row[name]]
        if name not in ("step", "seconds") and filled:
            columns[name] = Series(
                np.array([int(row["step"]) for row in filled]),
                np.array([float(row["seconds"] or "nan") for row in filled]),
                np.array([float(row[name]) for row in filled]),
            )
    return columns


# === Results ==========================================================================================================
def write_result(run: Run, folder: str) -> None:
    """Keep a run in the folder, which is made."""
    os.makedirs(folder, exist_ok=True)
    games = {tag: run.series[tag] for tag in (RETURN, LENGTH) if tag in run.series and not run.of_means}
    _write_table(os.path.join(folder, GAMES), {tag.rpartition("/")[2]: series for tag, series in games.items()})
    others = {tag: thinned(series) for tag, series in sorted(run.series.items()) if tag not in games}
    _write_table(os.path.join(folder, ITERATIONS), others)
    about: dict[str, Any] = {
        "env_id": run.env_id,
        "exp_name": run.exp_name,
        "seed": run.seed,
        "steps": run.steps,
        "of_means": run.of_means,
        "facts": {"command": report.command(run), "commit": "unknown", **run.facts, "date": report.day(run)},
        "arguments": run.params,
        "evaluation": run.evaluation,
    }
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(os.path.join(folder, "run.json")) as file:
        about["facts"] = {**about["facts"], "note": json.load(file)["facts"]["note"]}  # yours stays
    with open(os.path.join(folder, "run.json"), "w") as file:
        json.dump(about, file, indent=1)
        file.write("\n")


def read_result(folder: str, notes: list[str]) -> Run | None:
    """The kept run of a folder; None, and a line in the notes, where it can't be read."""
    try:
        with open(os.path.join(folder, "run.json")) as file:
            about = json.load(file)
        games = _read_table(os.path.join(folder, GAMES))
        series = _read_table(os.path.join(folder, ITERATIONS)) | {f"charts/{tag}": s for tag, s in games.items()}
        name = os.path.basename(os.path.abspath(folder))
        seed = None if about["seed"] is None else int(about["seed"])
        run = Run(name, folder, str(about["env_id"]), str(about["exp_name"]), seed, series)
        run.params, run.facts = dict(about["arguments"]), dict(about["facts"])
        run.of_means, evaluation = about["of_means"], about["evaluation"]
        run.evaluation = checked_evaluation(evaluation) if evaluation else None
        return run
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        notes.append(f"{folder} is no kept result: {type(error).__name__}: {error}".splitlines()[0])
        return None


def rebuild(out: str) -> list[str]:
    """Make README.md and the pictures from the tables; lines on what could not be read."""
    runs, notes = find_runs([out])
    if not runs:
        raise UsageError(f"{out}: {notes[0] if notes else 'no kept results'}")
    groups = curves.group_runs(runs)
    lines = [
        "# Results",
        "",
        "`make results` makes this page from the tables beside it. Failed and weaker runs stay in.",
    ]
    lines += ["", report.markdown_table(report.score_table(groups)), "", report.SOURCES, ""]
    for game, of_game in curves.by_game(groups).items():
        width = curves.bin_widths(of_game, None)[0]
        picture = f"{report.slug(game)}.png"
        lines += [f"## {game}", ""]
        if any(len(run.returns.steps) for group in of_game for run in group.runs):
            curves.draw_curves(os.path.join(out, picture), of_game, "steps", width, curves.LIGHT)
            lines += [f"![{game}: episodic return over environment steps]({picture})", ""]
        if same_step := report.same_step_table(of_game):
            lines += [report.markdown_table(same_step, 1), ""]
        for run in (run for group in of_game for run in group.runs):
            folder = os.path.relpath(run.folder, out)
            lines += [f"### {run.name}", ""]
            if len(run.returns.steps):
                curves.draw_run(os.path.join(run.folder, "curve.png"), run, width)
                lines += [f"![Every game of {run.name}]({quote(folder)}/curve.png)", ""]
            else:
                lines += ["No game has ended.", ""]
            facts = {k: v for k, v in run.facts.items() if k not in ("command", "note") and v}
            alone = curves.Group(run.env_id, run.exp_name, [run])
            lines += [report.markdown_table(report.run_table([alone]), 1), ""]
            lines += [f"```bash\n{report.command(run)}\n```", ""] if report.command(run) else []
            lines += [" · ".join(f"{key} {value}" for key, value in facts.items()), ""]
            if played := run.evaluation:
                lines += [
                    f"Evaluation: {played.get('games')} games, {played.get('actions')} actions: {played['mean']:.2f} ± "
                    f"{played['std']:.2f}, interquartile mean {played['iqm']:.2f}.",
                    "",
                ]
            lines += [str(run.facts["note"]), ""] if run.facts.get("note") else []
    with open(os.path.join(out, "README.md"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines).rstrip() + "\n")
    return notes


def keep(args: Args) -> None:
    """Keep the runs, and make the page and pictures of all that are kept."""
    curves.require_matplotlib()
    names = [os.path.basename(os.path.abspath(path)) for path in args.runs]
    for path, name in zip(args.runs, names, strict=True):
        if names.count(name) > 1:
            raise UsageError(
                f"{path}: another of these runs has this name, and {os.path.join(args.out, name)} is one's"
            )
    for path, name in zip(args.runs, names, strict=True):
        runs, notes = find_runs([path]) if os.path.isdir(path) else ([], [f"{path}: does not exist"])
        for note in notes:
            print(f"notice: {note}", file=sys.stderr)
        if len(runs) != 1:
            raise UsageError(f"{path}: {len(runs)} runs; name the folder of one run")
        folder = os.path.join(args.out, name)
        write_result(runs[0], folder)
        size = sum(os.path.getsize(os.path.join(folder, file)) for file in (GAMES, ITERATIONS, "run.json"))
        print(f"kept {folder}, {size / 1000:.0f} KB")
    for note in rebuild(args.out):
        print(f"notice: {note}", file=sys.stderr)
    print(f"wrote {os.path.join(args.out, 'README.md')}")


def main(argv: list[str]) -> int:
    return tool(keep, Args, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
