"""Studies of `cleanrl_utils.tune`, as their folders keep them for a report, and the pictures made of them."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cleanrl_utils.curves import Theme, picture
from cleanrl_utils.events import STUDY
from cleanrl_utils.runs import whole_file

REPORTS = 20  # of each run to the pruner


@dataclass(frozen=True)
class Param:
    """A flag to search: `choices`, or a range."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False

    def suggest(self, trial: Any) -> Any:
        """The value of one of Optuna's trials."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        suggest = trial.suggest_int if isinstance(self.low, int) else trial.suggest_float
        return suggest(self.name, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Trial:
    number: int
    state: str  # complete, pruned, failed, interrupted, running or waiting
    value: float | None
    seconds: float | None
    params: dict[str, Any]
    reports: list[tuple[int, float]]  # (number of the report, the trial's value by then)
    host: str | None
    failed: str | None  # why


@dataclass(frozen=True)
class Study:
    folder: str
    name: str
    env_ids: list[str]
    num_seeds: int
    last_games: int
    score: str  # what a value is
    params: list[Param]
    trials: list[Trial]
    importances: dict[str, float]  # how much of the values' differences each flag explains
    best: str  # the best trial's command line; "" before one is complete

    @property
    def complete(self) -> list[Trial]:
        """The trials with a final value, the best first."""
        return sorted((t for t in self.trials if t.state == "complete"), key=lambda t: -t.value)  # type: ignore[operator]

    @property
    def counts(self) -> str:
        """How many trials are in which state."""
        states = [trial.state for trial in self.trials]
        counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"{len(states)} trial{'s' * (len(states) != 1)}" + f": {counted}" * bool(counted)


def write_study(study: Study) -> None:
    """Keep it in its folder; several processes, also of several machines, may do so at once."""
    with whole_file(os.path.join(study.folder, STUDY)) as file:
        json.dump(dataclasses.asdict(study), file)


def read_study(folder: str) -> Study:
    """The study of a folder; one of the usual errors of parsing if it can't be read."""
    with open(os.path.join(folder, STUDY)) as file:
        told = json.load(file)
    params = [Param(**{**param, "choices": tuple(param["choices"])}) for param in told["params"]]
    trials = [
        Trial(**{**trial, "reports": [(int(n), float(x)) for n, x in trial["reports"]]}) for trial in told["trials"]
    ]
    for trial in trials:
        if trial.state == "complete":
            _ = float(trial.value)  # type: ignore[arg-type]
            for param in params:
                value, choices = trial.params[param.name], [word(choice) for choice in param.choices]
                _ = choices.index(word(value)) if choices else float(value)
    return Study(**{**told, "folder": folder, "params": params, "trials": trials})


def find_studies(paths: Iterable[str], notes: list[str]) -> list[Study]:
    """All studies under the paths; notes get a line for what is wrong."""
    every = {os.path.realpath(f): f for path in paths for f, _, files in os.walk(path) if STUDY in files}
    folders = sorted(every.values())
    found = []
    for folder in folders:
        try:
            found.append(read_study(folder))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"{os.path.join(folder, STUDY)} can't be read: {type(error).__name__}: {error}")
    return found


# === Pictures =========================================================================================================
def draw_history(path: str, study: Study, theme: Theme) -> None:
    """Each trial's value, and the best so far."""
    complete = sorted(study.complete, key=lambda trial: trial.number)
    pruned = [trial for trial in study.trials if trial.state == "pruned" and trial.value is not None]
    with picture(path, theme, 5.0, 3.2) as ax:
        numbers, values = [t.number for t in complete], np.array([t.value for t in complete], float)
        ax.step(numbers, np.maximum.accumulate(values), where="post", color=theme.lines[1], label="the best so far")
        ax.plot(numbers, values, "o", markersize=4, color=theme.lines[0], label="complete")
        if pruned:
            ax.plot([t.number for t in pruned], [t.value for t in pruned], "x", color=theme.lines[5], label="pruned")
        ax.set(title="values of the trials", xlabel="trial", ylabel=study.score)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.figure.legend(loc="outside lower left", ncols=3, handlelength=1.5)


def draw_reports(path: str, study: Study, theme: Theme) -> None:
    """What the trials have reported on their way, by which bad ones are pruned."""
    best = study.complete[0]
    with picture(path, theme, 5.0, 3.2) as ax:
        drawn = [trial for trial in study.trials if trial.state in ("complete", "pruned") and trial.reports]
        for trial in sorted(drawn, key=lambda trial: trial is best):  # it lies on top
            colour = theme.lines[1 if trial is best else 0 if trial.state == "complete" else 5]
            style = {"linewidth": 1.8, "alpha": 1.0} if trial is best else {"linewidth": 0.9, "alpha": 0.6}
            label = "the best" if trial is best else trial.state
            alone = "." if len(trial.reports) == 1 else None  # a line of one point would not be seen
            ax.plot(*zip(*trial.reports, strict=True), color=colour, label=label, marker=alone, **style)
        ax.set(title="the trials on their way", xlabel=f"report, {REPORTS} of each run", ylabel=study.score)
        ax.xaxis.get_major_locator().set_params(integer=True)
        handles = {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        ax.figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=3, handlelength=1.5)


def draw_slices(path: str, study: Study, theme: Theme) -> None:
    """The value over each flag, of the complete trials."""
    columns = min(2, len(study.params))
    rows = math.ceil(len(study.params) / columns)
    best, *others = study.complete
    grid: Any = {"nrows": rows, "ncols": columns, "sharey": True, "squeeze": False}
    with picture(path, theme, 5.0, max(3.2, 2.1 * rows), **grid) as axes:
        for ax, param in zip(axes.flat, study.params, strict=False):
            names = [word(choice) for choice in param.choices]
            for trials, colour in ((others, theme.lines[0]), ([best], theme.lines[1])):
                given = [trial.params[param.name] for trial in trials]
                x = [names.index(word(value)) for value in given] if names else given
                ax.plot(x, [trial.value for trial in trials], "o", markersize=4, color=colour, alpha=0.8)
            if names:
                ax.set(xticks=range(len(names)), xticklabels=names, xlim=(-0.5, len(names) - 0.5))
            else:
                ax.set(xscale="log" if param.log else "linear", xlim=_around(param))
                ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
                ax.minorticks_off()
            ax.set_xlabel(param.name)
        axes[0, 0].set_title("values over each flag")
        for ax in axes[:, 0]:
            ax.set_ylabel(study.score)
        for ax in axes.flat[len(study.params) :]:
            ax.remove()


def _around(param: Param) -> tuple[float, float]:
    """The flag's range with a margin."""
    if param.log:
        margin = (param.high / param.low) ** 0.05
        return param.low / margin, param.high * margin
    margin = (param.high - param.low) * 0.05
    return param.low - margin, param.high + margin


def draw_importances(path: str, study: Study, theme: Theme) -> None:
    """How much of the values' differences each flag explains."""
    names = list(study.importances)
    with picture(path, theme, 5.0, max(1.6, 0.9 + 0.4 * len(names))) as ax:
        bars = ax.barh(names, study.importances.values(), 0.6, color=theme.lines[0])
        ax.bar_label(bars, fmt="%.2f", padding=4, color=theme.ink)
        ax.set(title="how much each flag matters", xlabel="importance", ylim=(len(names) - 0.4, -0.6))
        ax.grid(visible=False, axis="y")
        ax.margins(x=0.12)


def word(value: Any) -> str:
    """A flag's value, as people write it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:.6g}" if isinstance(value, float) else str(value)


def pictures(study: Study) -> dict[str, tuple[str, Callable[[str, Study, Theme], None]]]:
    """(what it shows, how it is drawn) by the picture's name, of all that can be drawn of the study."""
    found: dict[str, tuple[str, Callable[[str, Study, Theme], None]]] = {}
    if study.complete:
        found["history"] = "value of each trial, and the best so far", draw_history
        found["intermediate_values"] = "what each trial has reported on its way", draw_reports
        found["slices"] = "value over each flag", draw_slices
    if study.importances:
        found["importances"] = "how much each flag matters", draw_importances
    return found
