"""Search a training script's flags with Optuna: python -m cleanrl_utils.tune --help"""

import contextlib
import copy
import csv
import difflib
import importlib.util
import math
import os
import re
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cleanrl_utils import studies
from cleanrl_utils.config import Fault, NonNegative, Positive, UsageError, require
from cleanrl_utils.runs import (
    OWN_FLAGS,
    Place,
    Run,
    StopRequest,
    end_all,
    experiment,
    flags_of,
    own_flags,
    places,
    tool,
    whole_file,
    words,
)
from cleanrl_utils.scores import RANDOM_AND_HUMAN, game_name
from cleanrl_utils.studies import REPORTS, Param, Study

EVERY = 0.2  # seconds between looks at the runs
READ_EVERY = 1.0  # seconds between looks into an event file
WARMUP = 4  # the first report of a run by which a trial can be pruned
HEARTBEAT, GRACE = 10, 60  # seconds: how often a trial says that it lives, and after how long it is taken for dead
PATIENCE = 60.0  # seconds that a pruned run has to end
GIVE_UP = 3  # failed trials before the first good one


@dataclass(frozen=True)
class Args:
    """Search a training script's flags with Optuna.

    A trial is one choice of the flags: a run on each game and seed, one after the other. Its value is the mean, over
    these runs, of the score of the last games. A trial that is worse than the median of the others at the same point
    is ended early. The same command line again, here or on other machines, works on the same study.

    Exit codes: 0 the trials are done, 1 none was good, 2 bad usage, 75 stopped by SIGTERM, 130 by Ctrl-C.
    """

    command: str
    """the command line of the script, as "python ppo_atari.py --total-timesteps 100000"; each run adds the trial's
    flags, --env-id and --seed, and where the script has them --exp-name, --run-name and --resume"""
    env_ids: tuple[str, ...]
    """the games"""
    params: tuple[str, ...]
    """the flags to search, each with a range or with choices: learning-rate=1e-5..1e-2:log update-epochs=1..8
    num-steps=64,128,256 anneal-lr=true,false; a range between whole numbers has whole numbers"""
    num_trials: Positive[int] = 50
    """trials of the study, of all processes that work on it"""
    num_seeds: Positive[int] = 1
    """seeds of each game in each trial"""
    start_seed: NonNegative[int] = 1
    """the first of the seeds"""
    workers: NonNegative[int] = 1
    """trials at once on this machine; 0: only show the results so far"""
    target_scores: tuple[str, ...] = ()
    """returns that count as 0 and as 1, as BreakoutNoFrameskip-v4=1.7..400; of several games these are random play's
    and a human's if not set, and the return of a single game counts as it is"""
    last_games: Positive[int] = 50
    """finished games at a run's end, or up to now, whose mean return is its score"""
    startup_trials: NonNegative[int] = 10
    """trials with random flags, which are not pruned, before the search learns from them"""
    prune: bool = True
    """end bad trials early; --no-prune lets all run to their end"""
    study_name: str | None = None
    """name of the study, and of its folder in runs/; the script's file name and "-tune" if not set"""
    storage: str = "sqlite:///runs/optuna.db"
    """where the study is: a database URL as SQLAlchemy takes it. SQLite is for one machine; several need a server, as
    postgresql+psycopg://user:password@host/database"""


# === What the flags say ===============================================================================================
def flag(name: str, value: Any) -> list[str]:
    """A trial's value as words of a command line; six digits of a number, so that people can read it."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", studies.word(value)]


def parse_param(text: str) -> Param:
    """
    >>> parse_param("learning-rate=1e-5..1e-2:log")
    Param(name='learning-rate', choices=(), low=1e-05, high=0.01, log=True)
    >>> parse_param("num-steps=64,128").choices, parse_param("anneal-lr=true,false").choices, parse_param("n=1..8").high
    (('64', '128'), (True, False), 8)
    """
    name, _, space = text.partition("=")
    name = name.lstrip("-").replace("_", "-")
    rule = "must be as learning-rate=1e-5..1e-2:log, num-steps=64,128 or anneal-lr=true,false"
    require(bool(re.fullmatch(r"[a-zA-Z][\w-]*", name)) and space != "", "--params", text, rule)
    require(f"--{name}" not in OWN_FLAGS, "--params", text, f"each run gets its --{name} from here")
    if ".." not in space:
        choices = tuple(space.split(","))
        require(len(set(choices)) == len(choices) > 1 and "" not in choices, "--params", text, rule)
        return Param(name, tuple(c == "true" for c in choices) if {*choices} == {"true", "false"} else choices)
    space, _, kind = space.partition(":")
    require(kind in ("", "log"), "--params", text, rule)
    low, high = parse_range("--params", text, space)
    require(kind == "" or low > 0, "--params", text, "a logarithmic range is above 0")
    return Param(name, (), low, high, kind == "log")


def parse_range(flag: str, text: str, space: str) -> tuple[float, float]:
    """LOW..HIGH, as whole numbers if both are written so."""
    try:
        low, high = space.split("..")
        ends: Sequence[float] = (int(low), int(high)) if "".join((low, high)).lstrip("-").isdigit() else ()
        ends = ends or (float(low), float(high))
    except ValueError:
        raise UsageError(f"{flag} {text}: the range must be LOW..HIGH") from None
    require(-float("inf") < ends[0] < ends[1] < float("inf"), flag, text, "LOW must be below HIGH")
    return ends[0], ends[1]


def parse_targets(args: Args) -> dict[str, tuple[float, float] | None]:
    """By game, the returns that count as 0 and 1; None where a return counts as it is."""
    given: dict[str, tuple[float, float]] = {}
    for text in args.target_scores:
        game, _, space = text.partition("=")
        require(game in args.env_ids, "--target-scores", text, "must be GAME=LOW..HIGH with one of the --env-ids")
        given[game] = parse_range("--target-scores", text, space)
    found: dict[str, tuple[float, float] | None] = {}
    for env_id in args.env_ids:
        human = RANDOM_AND_HUMAN.get(game_name(env_id)) if len(args.env_ids) > 1 else None
        found[env_id] = given.get(env_id, human)
        rule = f"no human's score of {env_id} is known: give it as {env_id}=LOW..HIGH"
        require(found[env_id] is not None or len(args.env_ids) == 1, "--target-scores", "", rule)
    return found


def check(args: Args, line: list[str], params: list[Param], flags: set[str]) -> None:
    """What can be known before a run is started."""
    require(args.env_ids != (), "--env-ids", "", "needs a game")
    require(len(set(args.env_ids)) == len(args.env_ids), "--env-ids", " ".join(args.env_ids), "has a game twice")
    require(args.params != (), "--params", "", "needs a flag to search")
    name = study_name(args, line)
    require(bool(re.fullmatch(r"[\w.-]+", name)), "--study-name", name, "must be letters, digits, -, _ and .")
    names = [param.name for param in params]
    require(len(set(names)) == len(names), "--params", " ".join(args.params), "has a flag twice")
    fixed = {word.partition("=")[0].replace("_", "-") for word in line}
    for param in params:
        own = {f"--{param.name}", f"--no-{param.name}"}
        require(not own & fixed, "--params", param.name, "is in --command too")
        if flags:
            near = difflib.get_close_matches(f"--{param.name}", flags, 3)
            rule = "the script has no such flag" + f"; did you mean {' or '.join(near)}?" * bool(near)
            require(f"--{param.name}" in flags, "--params", param.name, rule)


def study_name(args: Args, line: list[str]) -> str:
    return args.study_name or f"{experiment(line)}-tune"


def make_pruner(startup_trials: int) -> Any:
    """Optuna's median rule, within each run of a trial."""
    from optuna.pruners import MedianPruner

    class Pruner(MedianPruner):
        """A trial ends if its best report of this run is below the median of the others' at the same report.

        `MedianPruner` by itself would take the best report of all its runs: one good game would excuse all others.
        """

        def prune(self, study: Any, trial: Any) -> bool:
            before = (trial.last_step - 1) // REPORTS * REPORTS  # reports of the runs before
            if trial.last_step - before < WARMUP:
                return False
            trial = copy.copy(trial)
            trial.intermediate_values = {k: v for k, v in trial.intermediate_values.items() if k > before}
            return super().prune(study, trial)

    return Pruner(startup_trials)


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Whatever a database or its missing driver says is a usage error of one line."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        line = str(error).partition("\n")[0]
        raise UsageError(f"--storage: {type(error).__name__}: {line}") from None


def open_study(args: Args, name: str) -> Any:
    """The study, new or known. A usage error where the storage can't be used, or the study is another one."""
    import fcntl

    import optuna
    import sqlalchemy
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback

    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", "Heartbeat of storage is supposed")  # `search` records it
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder, sqlite = f"runs/{name}", args.storage.startswith("sqlite:///")
    file = args.storage.removeprefix("sqlite:///").partition("?")[0]
    with storage_errors():
        sqlalchemy.create_engine(args.storage)  # opens nothing yet
        if args.workers == 0:
            known = optuna.get_all_study_names(args.storage) if os.path.exists(file) or not sqlite else []
            require(name in known, "--study-name", name, "there is no such study yet")
    os.makedirs(folder, exist_ok=True)
    if sqlite:
        os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
    with open(f"{folder}/.lock", "w") as lock:  # two processes that make the same tables disturb each other
        fcntl.flock(lock, fcntl.LOCK_EX)
        with storage_errors():
            storage = RDBStorage(
                args.storage,
                engine_kwargs={"connect_args": {"timeout": 60}} if sqlite else {"pool_pre_ping": True},
                heartbeat_interval=HEARTBEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
            )
            left = [entry for entry in os.listdir(folder) if "__" in entry]
            if left and name not in optuna.get_all_study_names(storage):
                rule = f"is new, but {folder}/ has runs of another one; remove them or choose another --study-name"
                raise UsageError(f"--study-name {name}: {rule}")
            study = optuna.create_study(
                storage=storage,
                study_name=name,
                load_if_exists=True,
                direction="maximize",
                sampler=optuna.samplers.TPESampler(
                    n_startup_trials=args.startup_trials, multivariate=True, constant_liar=True
                ),
                pruner=make_pruner(args.startup_trials) if args.prune else optuna.pruners.NopPruner(),
            )
            given = {
                "--command": args.command,
                "--env-ids": list(args.env_ids),
                "--params": list(args.params),
                "--num-seeds": args.num_seeds,
                "--start-seed": args.start_seed,
                "--target-scores": list(args.target_scores),
                "--last-games": args.last_games,
            }
            before = study.user_attrs.get("flags")
            plain = study.directions == [optuna.study.StudyDirection.MAXIMIZE]
            told = any(trial.state != optuna.trial.TrialState.WAITING for trial in study.get_trials(deepcopy=False))
            rule = "is in this storage, and of another program; choose another name"
            require(before is not None or (plain and not told), "--study-name", name, rule)
            if before is None:
                study.set_user_attr("flags", given)
    for flag_, value in given.items():
        rule = f"the study {name} has {before and before[flag_]}; choose another --study-name"
        require(before in (None, given) or before[flag_] == value, flag_, value, rule)
    return study


# === Trials ===========================================================================================================
class Returns:
    """The returns of a run's games, from its event file."""

    def __init__(self, run: Run):
        self._run, self._events, self._last = run, None, 0.0
        self._games: list[tuple[int, float]] = []  # (step, return)
        self.step = 0

    def read(self, now: bool = False) -> None:
        """Look for new ones, not too often."""
        if now or time.monotonic() - self._last > READ_EVERY:
            self._last = time.monotonic()
            if self._events is None and (folder := self._run.events()):
                from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

                self._events = EventAccumulator(folder, size_guidance={"scalars": 0})
            if self._events is not None:
                self._events.Reload()
                tags = self._events.Tags()["scalars"]
                read = {
                    tag: self._events.Scalars(tag) for tag in ("charts/episodic_return", "charts/SPS") if tag in tags
                }
                self._games = [(game.step, game.value) for game in read.get("charts/episodic_return", [])]
                self.step = max((events[-1].step for events in read.values() if events), default=0)

    def mean(self, last: int, until: float = float("inf")) -> float | None:
        """Of the last games that ended until a step; None before the first."""
        found = [value for step, value in self._games if step <= until][-last:]
        return sum(found) / len(found) if found else None


class Trial:
    """A trial at work in a place: its runs one after the other."""

    def __init__(self, study: Any, trial: Any, args: Args, runs: list[tuple[str, Run]], place: Place):
        self.study, self.trial, self.place = study, trial, place
        self._args, self._targets, self._runs = args, parse_targets(args), runs
        self._scores: list[float] = []  # of the runs that are finished
        self._ending: str | None = None  # why the run was told to stop
        self._told_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self._env_id, self.run = self._runs[len(self._scores)]
        self._returns, self._reports = Returns(self.run), 0
        self.run.start(self.place)

    def look(self, stopping: bool) -> str | None:
        """How the trial ended: complete, pruned, interrupted, lost, or else why it failed. None: not yet.

        lost: another process has taken it for dead, and starts it anew.
        """
        if self.run.state == "elsewhere" and not stopping:  # the run of a killed tuner is writing its checkpoint
            self.run.start(self.place)
        if self.run.state == "elsewhere":
            return "interrupted" if stopping else None
        if not self.run.poll():
            if self._ending is None:
                self._returns.read()
                self._ending = self._report(self._returns.step)
                if self._ending is not None:
                    self._told_at = time.monotonic()
                    self.run.stop()
            elif time.monotonic() - self._told_at > PATIENCE:
                self.run.kill()
            return None
        return self._ending or self._after_run(stopping)

    def _after_run(self, stopping: bool) -> str | None:
        if self.run.state == "interrupted":
            return "interrupted"
        if self.run.state == "failed":
            return f"{self.run.how_it_ended}, log {self.run.log}"
        self._returns.read(now=True)
        mean = self._returns.mean(self._args.last_games)
        if mean is not None and not math.isfinite(mean):
            return f"the mean return is {mean}; log {self.run.log}"
        if mean is None:
            return f"no game was finished, or there are no charts/episodic_return; log {self.run.log}"
        ending = self._report(sys.maxsize)
        self._scores.append(self._normalized(mean))
        if len(self._scores) == len(self._runs):
            return ending if ending == "lost" else "complete"
        if ending is None and stopping:
            return "interrupted"
        if ending is None:
            self._begin()
        return ending

    @property
    def value(self) -> float:
        return sum(self._scores) / len(self._scores)

    def _normalized(self, mean: float) -> float:
        target = self._targets[self._env_id]
        return mean if target is None else (mean - target[0]) / (target[1] - target[0])

    def _report(self, step: int) -> str | None:
        """Report what is due at this step, the mean score of this run so far and of those before it.

        Returns "pruned" where the trial need not go on.
        """
        from optuna.exceptions import UpdateFinishedTrialError

        total = self._total()
        while total and self._reports < REPORTS and step >= total * (self._reports + 1) / REPORTS:
            self._reports += 1
            mean = self._returns.mean(self._args.last_games, total * self._reports / REPORTS)
            if mean is None or not math.isfinite(mean):
                continue
            scores = [*self._scores, self._normalized(mean)]
            try:
                self.trial.report(sum(scores) / len(scores), len(self._scores) * REPORTS + self._reports)
            except UpdateFinishedTrialError:
                return "lost"
            if self.trial.should_prune():
                return "pruned"
        return None

    def _total(self) -> int:
        """Steps of the run, by the command line or by what the script says; 0 if unknown."""
        given = dict(zip(self.run.line, self.run.line[1:], strict=False)).get("--total-timesteps", "")
        now = self.run.progress
        return int(given) if given.isdigit() else now.total if now else 0


def first_number(trial: Any) -> int:
    """The number of a trial, or of the one that it repeats since it was interrupted."""
    return trial.system_attrs.get("failed_trial", trial.number)


def wanted(study: Any, num_trials: int) -> bool:
    """Whether there is a trial to start. One that is repeated counts once."""
    import optuna

    optuna.storages.fail_stale_trials(study)
    trials = study.get_trials(deepcopy=False)
    waiting = any(trial.state == optuna.trial.TrialState.WAITING for trial in trials)
    return waiting or len({first_number(trial) for trial in trials}) < num_trials


def ask(study: Any, args: Args, line: list[str], params: list[Param], flags: set[str], place: Place) -> Trial:
    """Start the next trial."""
    trial = study.ask()
    study._storage.record_heartbeat(trial._trial_id)
    values = {param.name: param.suggest(trial) for param in params}
    chosen = [word for name, value in values.items() for word in flag(name, value)]
    number = first_number(study.get_trials(deepcopy=False)[trial.number])
    trial.set_user_attr("host", socket.gethostname())
    runs = []
    for seed in range(args.start_seed, args.start_seed + args.num_seeds):
        for env_id in args.env_ids:
            exp_name = f"{study.study_name}-{number:04}"
            name = f"{study.study_name}/{env_id.replace('/', '-')}__{exp_name}__{seed}"
            runs.append((env_id, Run(name, [*line, *chosen, *own_flags(flags, env_id, seed, exp_name, name)])))
    again = f" (again trial {number})" if number != trial.number else ""
    say(f"trial {trial.number}{again}: {shlex.join(chosen)}; {place}, log {runs[0][1].log}")
    return Trial(study, trial, args, runs, place)


def tell(work: Trial, how: str) -> bool:
    """Write a trial's end to the study. Whether it was a good one."""
    import optuna
    from optuna.trial import TrialState

    study, trial, number = work.study, work.trial, work.trial.number
    if study.get_trials(deepcopy=False)[number].state.is_finished():
        how = "lost"
    if how == "complete":
        study.tell(trial, work.value)
        say(f"trial {number} complete: {work.value:.4g}; the best so far is {study.best_value:.4g}")
    elif how == "pruned":
        found = study.tell(trial, state=TrialState.PRUNED)
        say(f"trial {number} pruned: {found.value:.4g}")
    elif how == "interrupted":
        found = study.tell(trial, state=TrialState.FAIL)
        optuna.storages.RetryHeartbeatStaleTrialCallback()(study, found)
        say(f"trial {number} interrupted: it goes on with the next start")
    elif how == "lost":
        say(f"trial {number} was taken for dead by another process, which goes on with it")
    else:
        trial.set_user_attr("failed", how)
        study.tell(trial, state=TrialState.FAIL)
        say(f"trial {number} failed: {how}")
    return how in ("complete", "pruned")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def search(study: Any, args: Args, line: list[str], params: list[Param], flags: set[str]) -> int:
    """Work on the study until its trials are done: the exit code."""
    active: dict[int, Trial] = {}  # by place
    workplaces, stop, began = places(args.workers), StopRequest(), time.monotonic()
    beat = asked = -HEARTBEAT * 1.0
    good = bad = 0
    more = True
    try:
        while True:
            if stop:
                stop.pass_on([work.run for work in active.values()])
            if time.monotonic() - beat > HEARTBEAT:
                beat = time.monotonic()
                for work in active.values():
                    study._storage.record_heartbeat(work.trial._trial_id)
            for slot in [*active]:
                how = active[slot].look(bool(stop))
                if how is not None:
                    work = active.pop(slot)
                    well = tell(work, how)
                    keep_if_possible(study, args, line, params)
                    good, bad = good + well, bad + (how not in ("complete", "pruned", "interrupted", "lost"))
                    asked = -1.0
                    if bad == GIVE_UP and not good:
                        raise Fault(f"the first {bad} trials have failed; {work.run.log} ends with\n{work.run.tail()}")
            if not stop and len(active) < len(workplaces) and time.monotonic() - asked > 1.0:
                asked = time.monotonic()
                for slot, place in enumerate(workplaces):
                    more = slot in active or wanted(study, args.num_trials)
                    if slot not in active and more:
                        active[slot] = ask(study, args, line, params, flags, place)
                        keep_if_possible(study, args, line, params)
            # Nothing to do: others may be at work, or dead, which shows after a while.
            idle = not active and not more
            late = time.monotonic() - began > GRACE + 3  # databases count whole seconds
            if (stop and not active) or (idle and (late or not others_running(study))):
                break
            time.sleep(EVERY)
    finally:
        end_all([work.run for work in active.values()])
    return stop.exit_code if stop else 0


def others_running(study: Any) -> bool:
    from optuna.trial import TrialState

    return any(trial.state == TrialState.RUNNING for trial in study.get_trials(deepcopy=False))


# === Results ==========================================================================================================
def keep(study: Any, args: Args, line: list[str], params: list[Param]) -> Study:
    """Write the study to its folder, for reports, as it is now."""
    import optuna

    trials = []
    for trial in study.get_trials(deepcopy=False):
        seconds = round(trial.duration.total_seconds(), 1) if trial.duration else None
        reports = sorted(trial.intermediate_values.items())
        about = [trial.user_attrs.get(name) for name in ("host", "failed")]
        trials.append(studies.Trial(trial.number, state_of(trial), trial.value, seconds, trial.params, reports, *about))
    score = "mean return" if None in parse_targets(args).values() else "normalised score"
    given = f"runs/{study.study_name}", study.study_name, list(args.env_ids), args.num_seeds, args.last_games, score
    kept = Study(*given, params, trials, {}, "")
    if len({trial.value for trial in kept.complete}) > 1 and len(params) > 1:  # else nothing is more important
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its evaluator
            kept = replace(kept, importances=optuna.importance.get_param_importances(study))
    if kept.complete:
        games = ["--env-id", args.env_ids[0]] if len(args.env_ids) == 1 else []
        chosen = [word for name, value in kept.complete[0].params.items() for word in flag(name, value)]
        kept = replace(kept, best=shlex.join([*line, *games, *chosen]))
    studies.write_study(kept)
    return kept


def keep_if_possible(*study: Any) -> None:
    """During the search: a full disk costs the report's file, which the next trial may write, and not the trials."""
    try:
        keep(*study)
    except OSError as error:
        print(f"warning: {error.filename}: {error.strerror}", file=sys.stderr)


def results(kept: Study) -> bool:
    """Print the best command line, and write trials.csv and the plots to the study's folder. False: no good trial."""
    from cleanrl_utils.curves import LIGHT

    names = sorted({name for trial in kept.trials for name in trial.params})
    with whole_file(f"{kept.folder}/trials.csv") as file:
        rows = csv.writer(file)
        rows.writerow(["trial", "state", "value", "seconds", *names, "host", "why it failed"])
        for trial in kept.trials:
            params = [trial.params.get(name) for name in names]
            rows.writerow([trial.number, trial.state, trial.value, trial.seconds, *params, trial.host, trial.failed])
    print(f"{kept.counts}; {kept.folder}/trials.csv")
    if not kept.complete:
        return False
    drawn = {f"{kept.folder}/{name}.png": draw for name, (_, draw) in studies.pictures(kept).items()}
    for path, draw in drawn.items():
        draw(path, kept, LIGHT)
    print(f"plots: {', '.join(drawn)}")
    print(f"the best is trial {kept.complete[0].number}: {kept.complete[0].value:.6g}\n{kept.best}")
    return True


def state_of(trial: Any) -> str:
    """Its state; Optuna counts also those as failed that were interrupted, and repeated later."""
    name = trial.state.name.lower()
    return name if name != "fail" else "failed" if "failed" in trial.user_attrs else "interrupted"


def main(args: Args) -> int:
    """The exit code."""
    line = words(args.command)
    params = [parse_param(text) for text in args.params]
    parse_targets(args)
    check(args, line, params, set())
    for package in ("optuna", "matplotlib"):
        found = importlib.util.find_spec(package) is not None
        require(found, package, "", "is missing: pip install 'cleanrl-distributed[tune]'")
    flags = flags_of(line) if args.workers else set()
    check(args, line, params, flags)
    from optuna.exceptions import StorageInternalError

    try:
        study = open_study(args, study_name(args, line))
        code = search(study, args, line, params, flags) if args.workers else 0
        good = results(keep(study, args, line, params))
    except StorageInternalError as error:
        cause = str(error.__cause__ or error).partition("\n")[0]
        raise Fault(f"the storage has failed: {cause}; the same command line continues the study") from None
    return code or int(not good)


if __name__ == "__main__":
    sys.exit(tool(main, Args, sys.argv[1:]))
