"""The tuner, with a script that trains nothing: values by hand, pruning, failures, kills, two at one study."""

import csv
import os
import re
import signal
import sys
from types import SimpleNamespace

import optuna
import pytest
import test_benchmark
from conftest import PATIENCE, ROOT, alive, children, kill_group, wait_until
from optuna.trial import TrialState

from cleanrl_utils import runs, studies, tune
from cleanrl_utils.config import UsageError

here = test_benchmark.here
FAKE = f"python {ROOT / 'tests' / 'fake_training.py'} --events"
STUDY = "fake_training-tune"
QUICK = (
    "import sys; from cleanrl_utils import runs, tune; "
    "tune.EVERY = tune.READ_EVERY = 0.05; sys.exit(runs.tool(tune.main, tune.Args, sys.argv[1:]))"
)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(tune, "EVERY", 0.05)
    monkeypatch.setattr(tune, "READ_EVERY", 0.05)


def argv(command, *flags):
    return [sys.executable, "-c", QUICK, "--command", command, *map(str, flags)]


def load(folder):
    return optuna.load_study(study_name=STUDY, storage=f"sqlite:///{folder.path}/runs/optuna.db")


def plan(folder, *choices):
    """A study whose first trials are these."""
    (folder.path / "runs").mkdir()
    storage = f"sqlite:///{folder.path}/runs/optuna.db"
    study = optuna.create_study(study_name=STUDY, storage=storage, direction="maximize")
    for params in choices:
        study.enqueue_trial(params)


def log(folder, number, game="A"):
    return (folder.path / "runs" / STUDY / f"{game}__{STUDY}-{number:04}__1" / "run.log").read_text()


def test_a_study(folder, here, quick, monkeypatch):
    """Two good trials, one that is pruned in its first game, one that fails; values and plots."""
    wanted = tune.wanted

    def two_by_two(study, num_trials):
        """The bad one comes when both good ones are complete: it makes no reports any more where it hangs."""
        begun = sum(trial.state != TrialState.WAITING for trial in study.trials)
        return wanted(study, num_trials) and (begun < 2 or all(t.state.is_finished() for t in study.trials[:2]))

    monkeypatch.setattr(tune, "wanted", two_by_two)
    plan(
        folder,
        {"quality": 1.0, "optimizer": "adam"},
        {"quality": 4.0, "optimizer": "adam"},
        {"quality": -3.0, "optimizer": "adam"},
        {"quality": 5.0, "optimizer": "sgd"},
    )
    line = (
        f"{FAKE} --fail-optimizer sgd --hang-below 0",
        *("--params", "quality=-5.0..5.0", "optimizer=adam,sgd", "--num-trials", 4, "--startup-trials", 2),
        *("--env-ids", "A", "BB", "--target-scores", "A=0..2", "BB=2..12", "--last-games", 5, "--workers", 2),
    )
    done = here(tune, 0, *line)
    study = load(folder)
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]
    # the last 5 of 20 games: quality * (0.8 + 0.85 + 0.9 + 0.95 + 1) / 5, and a game's own 1 and 2
    assert study.trials[0].value == pytest.approx(((0.9 + 1 - 0) / 2 + (0.9 + 2 - 2) / 10) / 2)
    assert study.trials[1].value == pytest.approx(((3.6 + 1 - 0) / 2 + (3.6 + 2 - 2) / 10) / 2)
    reports = study.trials[0].intermediate_values
    assert sorted(reports) == list(range(1, 41))
    assert reports[1] == pytest.approx((0.05 + 1) / 2)
    assert reports[10] == pytest.approx((0.4 + 1) / 2)
    assert reports[22] == pytest.approx(((0.9 + 1) / 2 + 0.075 / 10) / 2)

    # pruned: its process was ended in its middle, and the second game never begun
    pruned = study.trials[2]
    assert re.search(r"^stopped after iteration ([4-9]|10)\n\Z", log(folder, 2), re.M)
    assert not list((folder.path / "runs" / STUDY).glob("BB*-0002__1"))
    assert max(pruned.intermediate_values) >= tune.WARMUP and "trial 2 pruned: " in done.err

    name = f"runs/{STUDY}/A__{STUDY}-0003__1/run.log"
    assert study.trials[3].user_attrs["failed"] == f"exit code 1, log {name}"
    assert f"trial 3 failed: exit code 1, log {name}\n" in done.err
    finished = (folder.path / "finished.txt").read_text().split()
    assert len(finished) == len(set(finished)) == 4

    best = f"{FAKE} --fail-optimizer sgd --hang-below 0 --quality 4 --optimizer adam\n"
    assert f"the best is trial 1: {study.best_value:.6g}\n" in done.out and done.out.endswith(best)
    for plot in ("history", "slices", "intermediate_values", "importances"):
        png = (folder.path / "runs" / STUDY / f"{plot}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 5000, plot
    kept = studies.read_study(f"{folder.path}/runs/{STUDY}")
    assert [trial.value for trial in kept.complete] == [study.trials[1].value, study.trials[0].value]
    assert {*kept.importances} == {"quality", "optimizer"} and kept.best == best[:-1]
    assert kept.trials[0].reports == [*reports.items()] and kept.trials[2].state == "pruned"
    rows = list(csv.DictReader((folder.path / "runs" / STUDY / "trials.csv").open()))
    assert [row["state"] for row in rows] == ["complete", "complete", "pruned", "failed"]
    assert float(rows[1]["value"]) == study.best_value and rows[3]["why it failed"].startswith("exit code 1, log ")

    # again: nothing is left to do; with other flags it is another study
    again = here(tune, 0, *line)
    assert again.out == done.out and again.err == "" and len(load(folder).trials) == 4
    other = here(tune, 2, *line, "--num-seeds", "2")
    assert other.err == f"error: --num-seeds 2: the study {STUDY} has 1; choose another --study-name\n"


def test_stopped_killed_and_continued(folder, here, quick, monkeypatch):
    """SIGTERM, then SIGKILL, then to its end: one trial, in one folder, that goes on from its checkpoint."""
    plan(folder, {"quality": 1.0})
    line = (
        *(f"{FAKE} --hang-seed 1", "--env-ids", "A", "--params", "quality=0..5"),
        *("--num-trials", 1, "--last-games", 1),
    )
    for signal_, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -9)):
        if code == -9:
            (folder.path / "runs" / STUDY / f"A__{STUDY}-0000__1" / "checkpoint.json").write_text('{"iteration": 5}')
        count = len(re.findall("step 500/", log(folder, 0))) if code == -9 else 0
        job = folder.start(argv(*line), PYTHONPATH=str(ROOT))
        try:
            file = folder.path / "runs" / STUDY / f"A__{STUDY}-0000__1" / "run.log"
            wait_until(lambda: file.exists() and file.read_text().count("step 500/") > count, PATIENCE, "the run")  # noqa: B023
            family = children(job.pid)
            job.send_signal(signal_)
            job.wait(60)
            assert job.returncode == code
            wait_until(lambda: not any(map(alive, family)), 30, "nobody is left")  # noqa: B023
        finally:
            kill_group(job)
    states = [trial.state for trial in load(folder).trials]
    assert states == [TrialState.FAIL, TrialState.RUNNING]
    (folder.path / "go").touch()
    monkeypatch.setattr(tune, "HEARTBEAT", 1)  # what the killed one has left is taken for dead within seconds
    monkeypatch.setattr(tune, "GRACE", 3)
    done = here(tune, 0, *line)
    first, second, third = load(folder).trials
    assert [first.state, second.state, third.state] == [TrialState.FAIL, TrialState.FAIL, TrialState.COMPLETE]
    assert first.params == second.params == third.params and third.value == 2.0
    assert done.out.startswith("3 trials: 2 interrupted, 1 complete; ")
    assert "trial 2 (again trial 0): --quality 1;" in done.err
    assert os.listdir(folder.path / "runs" / STUDY / f"A__{STUDY}-0000__1").count("run.log") == 1
    assert log(folder, 0).count("from iteration 10\n") == 1 and log(folder, 0).count("from iteration 5\n") == 1


def test_two_tuners_at_one_study(folder):
    line = argv(f"{FAKE} --hang-seed 1", "--env-ids", "A", "--params", "quality=0.0..5.0", "--num-trials", 4)
    jobs = [folder.start(line, PYTHONPATH=str(ROOT)) for _ in range(2)]
    try:
        files = [folder.path / "runs" / STUDY / f"A__{STUDY}-{number:04}__1" / "run.log" for number in range(2)]
        wait_until(
            lambda: all(f.exists() and "step 500/" in f.read_text() for f in files), PATIENCE, "both are at work"
        )
        (folder.path / "go").touch()
        outputs = [job.communicate(timeout=PATIENCE) for job in jobs]
    finally:
        for job in jobs:
            kill_group(job)
    assert [job.returncode for job in jobs] == [0, 0], outputs
    trials = load(folder).trials
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert 4 <= len(trials) <= 5  # both may start a last one
    finished = (folder.path / "finished.txt").read_text().split()
    assert sorted(finished) == [f"{STUDY}/A__{STUDY}-{number:04}__1" for number in range(len(trials))]
    assert len({trial.params["quality"] for trial in trials}) == len(trials)
    assert all(re.search(r"^trial \d complete", err, re.M) for _, err in outputs), "both have worked"


@pytest.mark.slow
def test_a_trial_that_another_tuner_has_taken(folder):
    """As after a machine that was suspended: its trial was taken for dead, and is another's now."""
    line = argv(f"{FAKE} --hang-seed 1", "--env-ids", "A", "--params", "quality=0..5", "--num-trials", 1)
    job = folder.start(line, PYTHONPATH=str(ROOT))
    try:
        file = folder.path / "runs" / STUDY / f"A__{STUDY}-0000__1" / "run.log"
        wait_until(lambda: file.exists() and "step 500/" in file.read_text(), PATIENCE, "the run")
        load(folder).tell(0, state=TrialState.FAIL)
        (folder.path / "go").touch()
        output, said = job.communicate(timeout=PATIENCE)
    finally:
        kill_group(job)
    assert "trial 0 was taken for dead by another process, which goes on with it\n" in said
    assert job.returncode == 1 and "1 trial: 1 interrupted; " in output


def test_a_script_that_always_fails(folder, here, quick):
    line = (f"{FAKE} --fail-seed 1", "--env-ids", "A", "--params", "quality=0..5")
    said = here(tune, 1, *line).err
    says = rf"error: the first 3 trials have failed; runs/{STUDY}/A__{STUDY}-0002__1/run.log ends with\n"
    assert re.search(says, said) and said.endswith("    the loss is not finite\n")
    # the study is gone, its runs are not: a new one would continue them
    os.remove(folder.path / "runs" / "optuna.db")
    said = here(tune, 2, *line).err
    assert f"error: --study-name {STUDY}: is new, but runs/{STUDY}/ has runs of another one" in said


def test_the_median_rule_is_applied_within_each_run():
    study = optuna.create_study(direction="maximize", pruner=tune.make_pruner(2))
    reports = {1: 0.1, 4: 0.4, 20: 1.0, 21: 0.5, 24: 0.6, 40: 0.8}  # two runs

    def decisions(changes, shift=0.06, **end):
        trial, found = study.ask(), []
        for step, value in {**{step: value + shift for step, value in reports.items()}, **changes}.items():
            trial.report(value, step)
            found.append(bool(trial.should_prune()))
        study.tell(trial, **(end or {"state": TrialState.PRUNED}))
        return found

    for shift in (0.0, 0.1):  # the medians are 0.05 above `reports`
        assert decisions({}, shift, values=1.0) == [False] * 6
    assert decisions({}) == [False] * 6
    assert decisions({}, 0.04) == [False, True, True, False, True, True]  # not by the first reports of a run
    assert decisions({4: 0.0, 20: 9.0}) == [False, True, False, False, False, False]
    # a good first run does not excuse a bad second one
    assert decisions({4: 9.0, 20: 9.0, 24: 0.5, 40: 0.86}) == [False, False, False, False, True, False]


def test_a_return_that_is_no_number():
    work = object.__new__(tune.Trial)
    work._args, work.trial, work._scores, work._reports = SimpleNamespace(last_games=1), None, [], 0
    work.run = SimpleNamespace(state="finished", log="x.log", line=["--total-timesteps", "20"], progress=None)
    work._returns = SimpleNamespace(read=lambda **_: None, mean=lambda *_: float("nan"))
    assert work._report(20) is None and work._reports == tune.REPORTS, "none of them was told to Optuna"
    assert work._after_run(stopping=False) == "the mean return is nan; log x.log"


def test_a_study_of_another_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = f"sqlite:///{tmp_path}/optuna.db"
    optuna.create_study(study_name="less", storage=storage, direction="minimize")
    optuna.create_study(study_name="begun", storage=storage, direction="maximize").ask()
    args = tune.Args(command="x", env_ids=("A",), params=("a=1..2",), storage=storage)
    for name in ("less", "begun"):
        with pytest.raises(UsageError, match=f"--study-name {name}: is in this storage, and of another program"):
            tune.open_study(args, name)


def test_search_spaces():
    trial = optuna.trial.FixedTrial({"a": 3, "b": 0.01, "c": "64", "anneal-lr": False, "d": 0.5})
    params = ["a=1..8", "b=1e-5..1e-2:log", "c=64,128", "--anneal_lr=true,false", "d=-1..0.5"]
    values = [tune.parse_param(text).suggest(trial) for text in params]
    assert values == [3, 0.01, "64", False, 0.5]
    assert isinstance(tune.parse_param("a=1..8").low, int) and isinstance(tune.parse_param("d=-1..0.5").low, float)
    assert tune.parse_param("a=-8..-1").low == -8 and tune.parse_param("a=1_000..2_000:log").log
    assert tune.flag("learning-rate", 0.00031415926) == ["--learning-rate", "0.000314159"]
    assert tune.flag("anneal-lr", True) == ["--anneal-lr"] and tune.flag("n", 12345678) == ["--n", "12345678"]


def test_scores_of_several_games():
    def targets(*env_ids, given=()):
        return tune.parse_targets(tune.Args(command="x", env_ids=env_ids, params=(), target_scores=given))

    assert targets("PongNoFrameskip-v4") == {"PongNoFrameskip-v4": None}
    human = targets("PongNoFrameskip-v4", "ALE/Breakout-v5")
    assert human == {"PongNoFrameskip-v4": (-20.7, 14.6), "ALE/Breakout-v5": (1.7, 30.5)}
    mine = targets("PongNoFrameskip-v4", "ALE/Breakout-v5", given=("ALE/Breakout-v5=1.7..400",))
    assert mine == {"PongNoFrameskip-v4": (-20.7, 14.6), "ALE/Breakout-v5": (1.7, 400)}


BAD = {
    "--params a": "--params a: must be as learning-rate=1e-5..1e-2:log",
    "--params a=": "--params a=: must be as",
    "--params a=1": "--params a=1: must be as",
    "--params a=1,1": "--params a=1,1: must be as",
    "--params a=2..1": "--params a=2..1: LOW must be below HIGH",
    "--params a=x..1": "--params a=x..1: the range must be LOW..HIGH",
    "--params a=0..nan": "LOW must be below HIGH",
    "--params a=0..1:log": "--params a=0..1:log: a logarithmic range is above 0",
    "--params a=1..2:step": "--params a=1..2:step: must be as",
    "--params seed=1..2": "--params seed=1..2: each run gets its --seed from here",
    "--params quality=1..2 quality=2..3": "has a flag twice",
    "--params pause=1..2": "--params pause: is in --command too",
    "--params qualty=1..2": "--params qualty: the script has no such flag; did you mean --quality?",
    "--params": "--params: needs a flag to search",
    "--params quality=1..2 --study-name a/b": "--study-name a/b: must be letters",
    "--params quality=1..2 --target-scores B=1..2": "--target-scores B=1..2: must be GAME=LOW..HIGH with one of",
    "--params quality=1..2 --target-scores A=1": "--target-scores A=1: the range must be LOW..HIGH",
    "--params quality=1..2 --storage nowhere": "--storage: ",
    "--params quality=1..2 --storage postgresql+pg8000://h/d": "--storage: ModuleNotFoundError: No module named",
    "--params quality=1..2 --env-ids A B": "--target-scores: no human's score of A is known",
    "--params quality=1..2 --env-ids": "--env-ids: needs a game",
    "--params quality=1..2 --workers 0": f"--study-name {STUDY}: there is no such study yet",
    "--params quality=1..2 --last-games 0": "--last-games 0: must be above 0",
}


@pytest.mark.parametrize("flags, says", BAD.items())
def test_bad_command_lines(flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own_flags = {"--quality", "--pause", "--env-id", "--seed", "--run-name", "--resume"}
    monkeypatch.setattr(tune, "flags_of", lambda line: own_flags)
    monkeypatch.setattr(tune, "search", None)
    games = [] if "--env-ids" in flags else ["--env-ids", "A"]
    given = ["--command", f"{FAKE} --pause 0", *games, *flags.split()]
    assert runs.tool(tune.main, tune.Args, given) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err, err
    assert os.listdir(tmp_path) == []


def test_without_its_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune.importlib.util, "find_spec", lambda name: None)
    assert runs.tool(tune.main, tune.Args, ["--command", "true", "--env-ids", "A", "--params", "a=1..2"]) == 2
    assert capsys.readouterr().err == "error: optuna: is missing: pip install 'cleanrl-distributed[tune]'\n"


@pytest.mark.slow
def test_a_real_script(folder):
    flags = "--num-envs 4 --num-steps 64 --total-timesteps 8192 --update-epochs 1 --num-threads 1 --checkpoint-every 0"
    line = argv(
        f"python {ROOT / 'ppo_atari.py'} {flags}",
        *("--env-ids", "PongNoFrameskip-v4", "--params", "learning-rate=1e-4..1e-3:log", "num-minibatches=2,4"),
        *("--num-trials", 2, "--workers", 2, "--study-name", "real"),
    )
    done = folder.run(line, PYTHONPATH=str(ROOT))
    study = optuna.load_study(study_name="real", storage=f"sqlite:///{folder.path}/runs/optuna.db")
    assert all(-21 <= trial.value <= -15 for trial in study.trials) and len(study.trials) == 2, done.stderr
    assert re.search(r"--num-threads 1 .*--learning-rate 0\.000\d+ --num-minibatches [24]\n$", done.stdout)
