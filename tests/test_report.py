"""Event folders as pages, pictures, tables and kept results: numbers against hand-worked ones, and broken files."""

import base64
import html.parser
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import scalars
from matplotlib.figure import Figure
from PIL import Image

import ppo_atari
import ppo_atari_multigpu
from cleanrl_utils import curves, report, results, studies
from cleanrl_utils.config import parse
from cleanrl_utils.events import LENGTH, RETURN, Series, find_runs, read_events, read_records

START = 1_800_000_000  # seconds since 1970; all times below count from here
LOSS = "losses/value_loss"


def write(folder, points, start=0, purge_step=None, **tables):
    """An event file of a program that starts at second `start`. points: (tag, step, second, value)."""
    from torch.utils.tensorboard import SummaryWriter

    with mock.patch("time.time", lambda: START + start):
        writer = SummaryWriter(str(folder), purge_step=purge_step)
        for tag, table in tables.items():
            rows = "\n".join(f"|{key}|{value}|" for key, value in table.items())
            writer.add_text(tag, f"|param|value|\n|-|-|\n{rows}", walltime=START + start)
        for tag, step, second, value in points:
            writer.add_scalar(tag, value, step, walltime=START + second)
        writer.close()
    return str(folder)


def game(step, second, episodic_return, length=100):
    return [(RETURN, step, second, episodic_return), (LENGTH, step, second, length)]


def arguments(env_id="PongNoFrameskip-v4", exp_name="mine", seed=1, **more):
    return {"env_id": env_id, "exp_name": exp_name, "seed": seed, "total_timesteps": 1000, **more}


def make_run(root, seed, games, **identity):
    """A run in our format, with an iteration every 100 steps and 10 s. games: (step, return)."""
    params = arguments(seed=seed, **identity)
    points = [point for step, value in games for point in game(step, step / 10, value)]
    for step in range(100, max(step for step, _ in games) + 1, 100):
        points += [(LOSS, step, step / 10, step / 1000), ("time/env", step, step / 10, 0.25)]
        points += [("time/update", step, step / 10, 0.75), ("charts/SPS", step, step / 10, 10.0)]
    name = f"{params['env_id']}__{params['exp_name']}__{seed}__1"
    return write(root / name, sorted(points, key=lambda p: p[1]), purge_step=0, hyperparameters=params)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """runs/ with two experiments on Pong and Breakout, two seeds each; one run is shorter, one has videos."""
    root = tmp_path_factory.mktemp("project")
    for env_id in ("PongNoFrameskip-v4", "BreakoutNoFrameskip-v4"):
        for exp_name, gain in (("mine", 2.0), ("ppo_atari", 1.0)):
            for seed in (1, 2):
                last = 600 if (exp_name, seed) == ("mine", 2) else 1000
                games = [(step, gain * step / 100 + seed) for step in range(50, last + 1, 50)]
                make_run(root / "runs", seed, games, env_id=env_id, exp_name=exp_name)
    videos = root / "videos" / "PongNoFrameskip-v4__mine__1__1"
    videos.mkdir(parents=True)
    for number, size in ((0, 3000), (1, 3000), (8, 2000), (27, 1000)):
        (videos / f"rl-video-episode-{number}.mp4").write_bytes(bytes([number]) * size)
    return root


# === Reading ==========================================================================================================
def test_a_run_of_cleanrl(tmp_path):
    """Its tags and its text, and a folder of another machine's."""
    points = [*game(1776, 5.5, 2.0, 526), *game(1776, 5.5, 4.0, 500), (LOSS, 2048, 8, 0.25), *game(4096, 20, -1.0)]
    folder = tmp_path / "BreakoutNoFrameskip-v4__ppo_atari_multigpu__3__1795955349"
    params = arguments("BreakoutNoFrameskip-v4", "ppo_atari_multigpu", 3, local_num_envs=8, num_envs=16, world_size=2)
    params |= dict(num_iterations=4, batch_size=2048, device_ids="[]", track=False, anneal_lr=True, target_kl=None)
    write(folder, points, hyperparameters=params)
    ((run,), notes) = find_runs([str(tmp_path)])
    assert notes == [] and (run.env_id, run.exp_name, run.seed, run.game) == (
        "BreakoutNoFrameskip-v4", "ppo_atari_multigpu", 3, "Breakout",
    )  # fmt: skip
    assert run.returns.steps.tolist() == [1776, 1776, 4096] and run.returns.values.tolist() == [2.0, 4.0, -1.0]
    assert run.returns.seconds.tolist() == [5.5, 5.5, 20.0] and run.series[LENGTH].values.tolist() == [526, 500, 100]
    assert run.steps == 4096 and run.seconds == 20 and report.day(run) == "2027-01-15"
    assert report.command(run) == (
        "torchrun --standalone --nproc_per_node=2 ppo_atari_multigpu.py --env-id BreakoutNoFrameskip-v4"
        " --exp-name ppo_atari_multigpu --seed 3 --total-timesteps 1000 --local-num-envs 8 --no-track --anneal-lr"
    )


def test_a_run_of_stable_baselines3(tmp_path):
    """Its tags, brought to CleanRL's; it logs means over 100 games, and no arguments."""
    points = []
    for step, mean in ((512, 1.0), (1024, 3.0)):
        points += [("rollout/ep_rew_mean", step, step / 100, mean), ("rollout/ep_len_mean", step, step / 100, 700.0)]
        points += [("time/fps", step, step / 100, 400), ("train/entropy_loss", step, step / 100, -1.25)]
        points += [("train/value_loss", step, step / 100, 0.5), ("train/clip_fraction", step, step / 100, 0.125)]
    write(tmp_path / "logs" / "PPO_Breakout_2", points)
    ((run,), notes) = find_runs([str(tmp_path / "logs")])
    assert notes == [] and (run.env_id, run.exp_name, run.seed, run.of_means) == ("Breakout", "PPO", 2, True)
    assert run.returns.values.tolist() == [1.0, 3.0] and curves.score(run) == 3.0
    assert run.series["losses/entropy"].values.tolist() == [1.25, 1.25]
    assert run.series[LOSS].values.tolist() == [0.25, 0.25] and run.series["charts/SPS"].values.tolist() == [400, 400]
    assert run.series["losses/clipfrac"].values.tolist() == [0.125, 0.125] and report.command(run) == ""


@pytest.mark.parametrize(
    ("path", "identity"),
    [
        ("PongNoFrameskip-v4__my_idea__7__1795955349", ("PongNoFrameskip-v4", "my_idea", 7)),
        ("ALE-Pong-v5__x__1__1", ("ALE-Pong-v5", "x", 1)),
        ("PongNoFrameskip-v4/PPO_3", ("PongNoFrameskip-v4", "PPO", 3)),
        ("first", ("unknown game", "first", None)),
    ],
)
def test_what_a_folder_is_called(tmp_path, path, identity):
    write(tmp_path / path, game(1, 1, 1.0))
    ((run,), _) = find_runs([str(tmp_path)])
    assert (run.env_id, run.exp_name, run.seed) == identity


def test_a_resumed_run_counts_no_step_twice(tmp_path):
    """Killed at step 300, continued twice from 200: as TensorBoard shows it. Pauses are no time, lost work is."""
    first = [
        (LOSS, 100, 10, 1.0),
        *game(150, 20, -21.0),
        (LOSS, 200, 20, 2.0),
        *game(250, 30, -20.0),
        (LOSS, 300, 30, 3.0),
    ]
    write(tmp_path, first, purge_step=0)
    write(tmp_path, [*game(210, 1007, 5.0), (LOSS, 300, 1010, 30.0)], start=1000, purge_step=201)
    write(tmp_path, [*game(250, 5004, 7.0), *game(250, 5004, 8.0), (LOSS, 300, 5005, 31.0)], start=5000, purge_step=201)
    run = read_events(str(tmp_path))
    assert run.notes == [] and run.series[LOSS].steps.tolist() == [100, 200, 300]
    assert run.series[LOSS].values.tolist() == [1.0, 2.0, 31.0]
    assert run.returns.steps.tolist() == [150, 250, 250] and run.returns.values.tolist() == [-21.0, 7.0, 8.0]
    assert run.series[LOSS].seconds.tolist() == [10, 20, 30 + 10 + 5] and run.seconds == 45
    shown = scalars(str(tmp_path))
    assert {tag: list(zip(s.steps, s.values, strict=True)) for tag, s in run.series.items()} == shown


def test_a_folder_that_several_paths_lead_to_is_one_run(tmp_path):
    folder = write(tmp_path / "runs" / "PongNoFrameskip-v4__mine__1__1", game(1, 1, 1.0))
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for paths in (
        [tmp_path / "runs", folder],
        [tmp_path / "runs", f"{tmp_path}/runs/."],
        [tmp_path, tmp_path / "link"],
    ):
        ((run,), notes) = find_runs(map(str, paths))
        assert notes == [] and run.seed == 1


def test_a_file_of_another_program_beside_the_events(tmp_path):
    (tmp_path / "run.json").write_text('{"experiment": {}, "status": "COMPLETED"}')
    write(tmp_path, game(1, 1, 1.0))
    ((run,), notes) = find_runs([str(tmp_path)])
    assert notes == [] and run.returns.values.tolist() == [1.0]


def test_a_folder_continued_without_saying_so(tmp_path):
    write(tmp_path, [(LOSS, 100, 1, 1.0), (LOSS, 200, 2, 2.0), (LOSS, 300, 3, 3.0)])
    write(tmp_path, [(LOSS, 200, 101, 20.0), (LOSS, 300, 102, 30.0)], start=100)
    run = read_events(str(tmp_path))
    assert run.series[LOSS].steps.tolist() == [100, 200, 300] and run.series[LOSS].values.tolist() == [1, 20, 30]
    assert len(run.notes) == 1 and "goes back from step 300 to 200" in run.notes[0]


def event_file(folder):
    (name,) = os.listdir(folder)
    return os.path.join(folder, name)


def test_broken_files_are_a_line_each(tmp_path, capsys):
    """Cut, flipped in a value, flipped in a length, empty, foreign, without scalars: what is sound is shown."""
    games = [(step, float(step)) for step in (10, 20, 30)]
    folders = {name: make_run(tmp_path / "runs" / name, 1, games) for name in ("cut", "value", "length", "ok")}
    data = {name: Path(event_file(folder)).read_bytes() for name, folder in folders.items()}
    starts = [0]  # of the records
    while starts[-1] < len(data["cut"]):
        starts.append(starts[-1] + 16 + int.from_bytes(data["cut"][starts[-1] : starts[-1] + 8], "little"))
    assert len(starts) - 1 == 10  # 2 versions, start, text, 3 games of 2 tags

    def replace(name, new):
        with open(event_file(folders[name]), "wb") as file:
            file.write(new)

    def flipped(old, at):
        return old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]

    replace("cut", data["cut"][:-5])
    replace("value", flipped(data["value"], starts[6] - 6))  # the first game's length, in its last bytes
    replace("length", flipped(data["length"], starts[6] + 3))
    for name, content in (("empty", b""), ("foreign", b"# not events\n" * 9)):
        os.makedirs(tmp_path / "runs" / name)
        (tmp_path / "runs" / name / "events.out.tfevents.1").write_bytes(content)
    write(tmp_path / "runs" / "nothing", [])
    runs, notes = find_runs([str(tmp_path / "runs")])
    found = {run.name.partition("/")[0]: run for run in runs}
    assert set(found) == {"cut", "value", "length", "ok"} and len(notes) == 6
    for name, steps, lengths, note in (
        ("ok", [10, 20, 30], 3, None),
        ("cut", [10, 20, 30], 2, "ends within a record; its first 9 records are used"),
        ("value", [10, 20, 30], 2, "has 1 damaged record"),
        ("length", [10], 1, f"is damaged from byte {starts[6]} on; its first 6 records are used"),
    ):
        assert found[name].returns.steps.tolist() == steps and len(found[name].series[LENGTH].steps) == lengths
        assert [n.partition(" ")[2] for n in found[name].notes] == [note] * (note is not None)
    assert sorted(n.rpartition("/")[2] for n in notes[-6:] if "damaged" not in n and "within" not in n) == [
        "events.out.tfevents.1 is empty", "events.out.tfevents.1 is no event file", "nothing has no scalars yet",
    ]  # fmt: skip
    with mock.patch.object(report, "game_section", lambda *_: ""):
        assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    err = capsys.readouterr().err
    assert err.count("notice: ") == 7 and "4 runs have seed 1" in err and "Traceback" not in err
    text = (tmp_path / "out" / "index.html").read_text()
    assert "Not everything could be read" in text and text.count("<li>") == 7


def test_every_flipped_bit_is_noticed(tmp_path):
    data = Path(event_file(make_run(tmp_path, 1, [(10, 1.0)]))).read_bytes()
    whole, problem = read_records(data)
    assert problem == "" and len(whole) == 6
    for bit in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        records, problem = read_records(bytes(flipped))
        assert problem and all(record in whole for record in records), bit
    for length in range(1, len(data)):
        records, problem = read_records(data[:length])
        assert records == whole[: len(records)] and (problem or sum(16 + len(r) for r in records) == length)


# === Numbers ==========================================================================================================
def series(steps, values, seconds=None):
    steps = np.array(steps)
    return Series(steps, steps / 10 if seconds is None else np.array(seconds, float), np.array(values, float))


def test_bins():
    """(0, 10], (10, 20], (20, 30]: a game belongs to the bin in which it ended; a gap is bridged, ends are not."""
    x, values = np.array([0, 5, 10, 11, 30]), np.array([1.0, 2.0, 6.0, 4.0, np.nan])
    np.testing.assert_array_equal(curves.binned(x, values, 10, 3), [3.0, 4.0, np.nan])
    c = curves.curve([series([15, 45], [2.0, 5.0])], "steps", 10)
    np.testing.assert_array_equal(c.runs, [[np.nan, 2.0, 3.0, 4.0, 5.0]])
    assert c.x.tolist() == [5, 15, 25, 35, 45] and np.isnan(c.low).all()
    begun = [series([3], [1.0]), series([5, 15, 24], [1.0, 2.0, 9.0])]  # the third bin is not half over
    np.testing.assert_array_equal(curves.curve(begun, "steps", 10).runs, [[1.0, np.nan], [1.0, 2.0]])


def test_the_mean_ends_with_the_shortest_run():
    c = curves.curve([series([10, 20, 30], [1, 2, 3]), series([10, 20], [3, 6])], "steps", 10)
    np.testing.assert_array_equal(c.mean, [2.0, 4.0, np.nan])
    np.testing.assert_array_equal(c.low, [1.0, 2.0, np.nan])
    np.testing.assert_array_equal(c.high, [3.0, 6.0, np.nan])
    over_time = curves.curve([series([10, 20], [1, 3], seconds=[1, 4]), series([10, 20], [5, 9], [2, 3])], "seconds", 2)
    np.testing.assert_array_equal(over_time.mean, [3.0, 6.0])


def test_bootstrap_bounds():
    """Of 4 runs of which one has 4 and the others 0, the resampled sum / 4 is binomial (4, 1/4): P(3 or more) = 5.1 %,
    P(4) = 0.4 %. Of 3 runs, all three draws are the same run with 1/27 > 2.5 %."""
    assert [bound.tolist() for bound in curves.bootstrap(np.array([[0.0], [4.0], [0.0], [0.0]]))] == [[0.0], [3.0]]
    assert [bound.tolist() for bound in curves.bootstrap(np.array([[1.0], [2.0], [6.0]]))] == [[1.0], [6.0]]
    assert np.isnan(curves.bootstrap(np.array([[1.0]]))).all()
    many = np.random.default_rng(1).normal(size=(400, 1))
    np.testing.assert_allclose(np.ravel(curves.bootstrap(many)) - many.mean(), [-1.96 / 20, 1.96 / 20], atol=0.02)


def test_the_width_of_bins(tmp_path, capsys):
    run = read_events(write(tmp_path, [*game(900, 90, 1.0), *game(2_000_000, 200_000, 2.0)]))
    groups = curves.group_runs([run])
    assert curves.bin_widths(groups, None) == (50_000, 2 * 3600)  # 2 million / 50, rounded up; 55 hours in 2 h
    assert curves.bin_widths(groups, 400_000)[0] == 400_000
    argv = [str(tmp_path), "--window", "300", "--out", str(tmp_path / "out")]
    assert report.main(argv) == 2 and not (tmp_path / "out").exists()
    assert capsys.readouterr().err.startswith("error: --window 300: cuts the 2,000,000 steps of ")


def test_what_is_drawn(project):
    """The lines of the pictures, by hand: a game every 50 steps returns 2 x / 100 + seed; bins of 200 hold four."""
    runs, _ = find_runs([str(project / "runs")], "Pong*")
    groups = curves.group_runs(runs)
    figures = []
    with mock.patch.object(Figure, "savefig", lambda figure, path, **_: figures.append(figure)), pytest.raises(OSError):
        curves.draw_curves("none.png", groups, "steps", 200, curves.LIGHT)
    with mock.patch.object(Figure, "savefig", lambda figure, path, **_: figures.append(figure)), pytest.raises(OSError):
        curves.draw_curves("none.png", groups, "seconds", 20, curves.DARK)
    for figure, unit, x in ((figures[0], "steps", 100.0), (figures[1], "seconds", 10.0)):
        (ax,) = figure.axes
        assert ax.get_title(loc="left") == f"Pong: mean of the games in bins of {200 if unit == 'steps' else 20} {unit}"
        mine_1, mine_2, mine, _, _, theirs = ax.get_lines()
        middle = np.array([x, 3 * x, 5 * x, 7 * x, 9 * x])
        mean_of_bin = np.array([2.5, 6.5, 10.5, 14.5, 18.5])  # of 2 x / 100 over 50, 100, 150, 200, and so on
        np.testing.assert_allclose(mine_1.get_xydata(), np.stack([middle, mean_of_bin + 1], 1))
        np.testing.assert_allclose(mine_2.get_ydata(), [*(mean_of_bin + 2)[:3], np.nan, np.nan])
        np.testing.assert_allclose(mine.get_ydata(), [4.0, 8.0, 12.0, np.nan, np.nan])
        np.testing.assert_allclose(theirs.get_ydata(), mean_of_bin / 2 + 1.5)
        assert mine.get_label() == "mine · 2 seeds" and theirs.get_color() != mine.get_color()
        band = ax.collections[1].get_paths()[0].vertices[:, 1]
        assert band.min() == pytest.approx(2.25) and band.max() == pytest.approx(11.25)  # the two seeds


def test_a_picture_that_two_processes_draw_at_once(tmp_path, monkeypatch):
    """The other one begins to write the file in the middle of this one's work."""
    path, opened = tmp_path / "a.png", Image.open

    def meanwhile(file):
        path.write_bytes(b"")
        return opened(file)

    monkeypatch.setattr(Image, "open", meanwhile)
    with curves.picture(str(path), curves.LIGHT, 2, 1):
        pass
    assert opened(path).size == (320, 160) and os.listdir(tmp_path) == ["a.png"]


def test_the_score_table(tmp_path):
    """Seed 1: the last 100 of 150 games, 0 for 50, then -10 and 10 by turns and 6 at last; seed 2: one game of 3."""
    late = [(1000 + i, -10.0 if i % 2 else 10.0) for i in range(99)] + [(1200, 6.0)]
    make_run(tmp_path, 1, [(i, 21.0) for i in range(1, 51)] + late)
    make_run(tmp_path, 2, [(500, 3.0)])
    runs, _ = find_runs([str(tmp_path)])
    assert [curves.score(run) for run in runs] == [0.16, 3.0]  # (50 * 10 - 49 * 10 + 6) / 100
    head, row = report.score_table(curves.group_runs(runs))
    table = dict(zip(head, row, strict=True))
    assert table["Score"] == "0.16, 3.00" and table["Seeds"] == "2" and table["Steps"] == "500 to 1.2 k"
    assert table["Human-normalised"] == "0.59, 0.67"  # 20.86 / 35.3 and 23.7 / 35.3; one is twice as long
    assert table["CleanRL, 10 M steps"] == "20.36 ± 0.20" and table["Random, human"] == "\u221220.7, 14.6"
    assert table["Evaluation"] == "\u2013"


def test_experiments_are_compared_at_the_same_step(project):
    """The shortest of the runs ends at 600; a game every 50 steps, with a return of gain * step / 100 + seed."""
    runs, _ = find_runs([str(project / "runs")], "Pong*")
    head, mine, other = report.same_step_table(curves.group_runs(runs))
    assert head == ["Experiment", "Score at 600 steps", "Of each run"]
    assert mine == ["mine", "8.00 ± 0.71", "7.50, 8.50"]  # the mean of 1, 2, ... 12, with seeds 1 and 2
    assert other == ["ppo_atari", "4.75 ± 0.71", "4.25, 5.25"]
    assert report.same_step_table(curves.group_runs(runs)[:1]) == []
    assert report.same_step_table(curves.group_runs([run for run in runs if run.steps == 1000])) == []


def test_evaluations_are_in_the_table(tmp_path):
    for seed, mean in ((1, 18.0), (2, 20.0)):
        folder = make_run(tmp_path, seed, [(100, 1.0)], exp_name="ppo_atari_multigpu")
        with open(f"{folder}/evaluation.json", "w") as file:
            json.dump({"mean": mean, "std": 1.0, "iqm": mean, "games": 10, "actions": "sampled"}, file)
    broken = make_run(tmp_path, 3, [(100, 1.0)], exp_name="ppo_atari_multigpu")
    with open(f"{broken}/evaluation.json", "w") as file:
        file.write('{"mean": nul')
    foreign = make_run(tmp_path, 4, [(100, 1.0)], exp_name="ppo_atari_multigpu")
    with open(f"{foreign}/evaluation.json", "w") as file:
        file.write('{"mean": 1, "std": 1, "iqm": 1, "games": "many"}')
    runs, notes = find_runs([str(tmp_path)])
    head, row = report.score_table(curves.group_runs(runs))
    table = dict(zip(head, row, strict=True))
    assert table["Evaluation"] == "19.00 ± 1.41 (20 games, 2 seeds)" and table["CleanRL, 10 M steps"] == "20.34 ± 0.43"
    assert len(notes) == 2 and "evaluation.json can't be read: JSONDecodeError" in notes[0]
    assert "evaluation.json can't be read: ValueError" in notes[1]


def test_aggregates(project):
    """Human-normalised scores of two games; the interquartile mean of 4 is the mean of the middle two."""
    runs, _ = find_runs([str(project / "runs")])
    matrices, games, notes = curves.score_matrices(curves.group_runs(runs))
    assert games == ["Breakout", "Pong"] and notes == [] and set(matrices) == {"mine", "ppo_atari"}
    # mean of 2 x / 100 over all games, x 50, 100, ..., 1000: 10.5, and up to 600: 6.5; seed added; see scores.py
    breakout, pong = [(11.5 - 1.7) / 28.8, (8.5 - 1.7) / 28.8], [(11.5 + 20.7) / 35.3, (8.5 + 20.7) / 35.3]
    np.testing.assert_allclose(matrices["mine"], np.array([breakout, pong]).T)
    estimates, profiles = curves.aggregates(matrices, np.array([0.0, 0.3, 0.85, 2.0]))
    (iqm, gap), (low, high) = estimates["mine"]
    values = sorted(breakout + pong)
    assert iqm == pytest.approx(sum(values[1:3]) / 2) and gap == pytest.approx(1 - sum(values) / 4)
    assert low[0] == pytest.approx((breakout[1] + pong[1]) / 2) and high[0] == pytest.approx(
        (breakout[0] + pong[0]) / 2
    )
    assert profiles["mine"][0].tolist() == [1.0, 0.75, 0.25, 0.0]
    only_pong = [run for run in runs if run.game == "Pong" or run.exp_name == "mine"]
    matrices, _, notes = curves.score_matrices(curves.group_runs(only_pong))
    assert set(matrices) == {"mine"} and notes == ["ppo_atari has no score of Breakout and is left out here"]


# === The page =========================================================================================================
class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.cells, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.links += [attrs[name] for name in ("src", "srcset", "href", "poster", "action") if attrs.get(name)]
        if tag not in ("meta", "img", "source", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th", "pre"):
            self.cells.append(data)


def test_the_page(project, tmp_path, capsys):
    """One file: every picture and video is in it and decodes; nothing is loaded; the commands and numbers are there."""
    out = tmp_path / "report"
    assert report.main([str(project / "runs"), "--out", str(out), "--title", "A < B", "--window", "200"]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {out}/index.html, ")
    text = (out / "index.html").read_text()
    page = Page(text)
    assert page.open == [] and "A &lt; B" in text
    assert all(link.startswith(("data:image/png;base64,", "data:video/mp4;base64,", "#")) for link in page.links)
    assert not re.search(r"url\(|@import|<script|<link", text)
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    pictures = [link for link in page.links if link.startswith("data:image")]
    assert len(pictures) == 2 * (2 + 2 * 3)  # light and dark: aggregates, profile; 2 curves and the losses of each game
    for link in pictures:
        image = Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2])))
        image.load()
        assert min(image.size) > 400 and len(image.getcolors(1 << 20)) > 10
    videos = [base64.b64decode(link.partition(",")[2]) for link in page.links if link.startswith("data:video")]
    assert videos == [bytes([27]) * 1000, bytes([0]) * 3000]  # the latest game, the first
    assert all(attrs.get("alt") for tag, attrs in page.tags if tag == "img")
    assert {"25.0 %", "75.0 %", "1,000", "0:01:40", "PongNoFrameskip-v4__mine__1__1"} <= set(page.cells)
    command = "python mine.py --env-id PongNoFrameskip-v4 --exp-name mine --seed 1 --total-timesteps 1000"
    assert command in page.cells and "mine, PongNoFrameskip-v4, seeds 1, 2" in text
    names = ("aggregate", "profile", *(f"{g}-{p}" for g in ("Pong", "Breakout") for p in ("steps", "time", "losses")))
    assert sorted(os.listdir(out)) == sorted([*(f"{name}.png" for name in names), "index.html", "scores.md"])
    lines = (out / "scores.md").read_text().splitlines()
    assert lines[2].startswith("| BreakoutNoFrameskip-v4 | mine | 10.00 ± 2.12 | 0.29 ± 0.07 | 2 | 600 to 1 k |")
    assert lines[1].count("---:") == 7 and "docs.cleanrl.dev" in lines[-1]


def make_study(root, states=("complete", "pruned", "complete", "running"), params=("lr", "steps", "anneal")):
    """A study in runs/, whose trials have a run each on Pong; those that are complete have their number as value."""
    spaces = {"lr": dict(low=1e-5, high=1e-2, log=True), "steps": dict(choices=("64", "128"))}
    spaces |= {"anneal": dict(choices=(True, False)), "epochs": dict(low=1, high=8)}
    values = {"lr": 1e-3, "steps": "128", "anneal": False, "epochs": 3}
    trials = []
    for number, state in enumerate(states):
        make_run(root / "runs" / "<search>", number, [(50, 1.0)], exp_name=f"search-{number:04}")
        reports = [(1, 0.5), (2, float(number))][: 2 if state == "complete" else 1]
        value = float(number) if state in ("complete", "pruned") else None
        chosen = {name: values[name] for name in params}
        trials.append(studies.Trial(number, state, value, 1.5, chosen, reports, "host", None))
    found = [studies.Param(name, **spaces[name]) for name in params]
    importances = {"lr": 0.75, "steps": 0.25} if len(params) > 1 and "complete" in states else {}
    folder = str(root / "runs" / "<search>")
    about = folder, "<search>", ["PongNoFrameskip-v4"], 2, 50, "mean return"
    study = studies.Study(*about, found, trials, importances, "python mine.py --lr 0.001")
    studies.write_study(study)
    return study


def test_a_study_has_a_section_and_its_runs_none(tmp_path, capsys):
    """Its plots, light and dark, its best trials and their command; its runs are shown where they are asked for."""
    study = make_study(tmp_path)
    assert studies.read_study(study.folder) == study
    make_run(tmp_path / "runs", 1, [(100, 1.0), (200, 2.0)])
    out = tmp_path / "out"
    assert report.main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    said = f"notice: {study.folder} is a study: its section shows its trials, whose runs are left out\n"
    assert capsys.readouterr().err == said
    text = (out / "index.html").read_text()
    page = Page(text)
    assert page.open == [] and "search-000" not in text and "<search>" not in text and "1 run, 1 experiment" in text
    assert "4 trials: 2 complete, 1 pruned, 1 running. A trial&#x27;s value is the mean return of a run&#x27;s" in text
    assert "#study-search" in page.links and "python mine.py --lr 0.001" in page.cells
    row = page.cells.index("2.000")
    assert page.cells[row - 1 : row + 4] == ["2", "2.000", "0.001", "128", "false"]
    names = sorted(name for name in os.listdir(out) if name.startswith("search-"))
    assert names == [f"search-{name}.png" for name in ("history", "importances", "intermediate_values", "slices")]
    pictures = [link for link in page.links if link.startswith("data:image")]
    assert len(pictures) == 2 * (3 + 4)  # curves over steps and time, losses; the study's

    runs, _ = find_runs(sorted(str(path) for path in Path(study.folder).glob("*/")))
    assert [run.exp_name for run in runs] == [f"search-{number:04}" for number in range(4)]
    assert report.main([study.folder, "--out", str(out)]) == 0  # alone
    assert "<h2>Scores" not in (out / "index.html").read_text()
    assert report.main([str(tmp_path / "runs"), "--only", "Pong*", "--out", str(out)]) == 0
    assert "search" not in (out / "index.html").read_text()
    assert f"notice: {study.folder} is a study, whose trials' runs are left out\n" in capsys.readouterr().err


@pytest.mark.parametrize("states, params", [(("complete",), ("epochs",)), (("running", "failed"), ("lr", "anneal"))])
def test_a_study_that_has_just_begun(tmp_path, states, params):
    study = make_study(tmp_path, states, params)
    assert report.main([study.folder, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "index.html").read_text().count("<img") == 3 * ("complete" in states)


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"params": [], "trials": [{"reports": 1}]}'])
def test_a_study_that_can_not_be_read_is_a_line(tmp_path, damage, capsys):
    study = make_study(tmp_path)
    make_run(tmp_path / "runs", 1, [(100, 1.0)])
    (Path(study.folder) / "study.json").write_text(damage)
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"notice: {study.folder}/study.json can't be read: ") and err.count("\n") == 1, err


def test_a_study_whose_trials_do_not_fit_its_flags(tmp_path):
    study = make_study(tmp_path)
    text = (Path(study.folder) / "study.json").read_text()
    for old, new in (('"steps": "128"', '"steps": "999"'), ('"lr": 0.001', '"lr": "fast"')):
        notes: list[str] = []
        (Path(study.folder) / "study.json").write_text(text.replace(old, new))
        assert studies.find_studies([study.folder], notes) == [] and "can't be read: ValueError" in notes[0]


def test_the_order_of_videos(tmp_path):
    """Of an evaluation, the latest game, the first; wherever runs/ is, also of runs in folders."""
    run = read_events(make_run(tmp_path / "runs" / "grid", 1, [(1, 1.0)]))
    videos = tmp_path / "videos" / "grid" / os.path.basename(run.folder)
    videos.mkdir(parents=True)
    names = [videos / f"rl-video-episode-{number}.mp4" for number in (0, 27, 8)]
    names += [Path(run.folder) / f"evaluation-{which}.mp4" for which in ("best", "median")]
    for name in names:
        name.write_bytes(b"video")
    assert report.find_videos(run) == [str(names[i]) for i in (3, 4, 1, 0)]
    os.remove(names[1])
    os.remove(names[2])
    assert report.find_videos(run) == [str(names[i]) for i in (3, 4, 0)]


def test_the_cap_on_videos(project, tmp_path):
    out = tmp_path / "report"
    arguments = [str(project / "runs"), "--only", "Pong*mine__1*", "--out", str(out), "--video-mb", "0.002"]
    assert report.main(arguments) == 0
    text = (out / "index.html").read_text()
    assert text.count("<video") == 1 and "Left out, over the cap of 0.002 MB: 1 videos of 0.0 MB: " in text
    assert "rl-video-episode-0.mp4" in text and "Over all games" not in text


def test_bad_command_lines_make_nothing(project, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argv, line in (
        (["nowhere"], "error: nowhere: does not exist"),
        ([], "error: runs: does not exist"),
        ([str(project / "videos")], f"error: {project}/videos: no run with scalars"),
        ([str(project / "runs"), "--only", "Q*"], f"error: {project}/runs: no run with scalars with a name like Q*"),
        ([str(project / "runs"), "--window", "0"], "error: --window 0: must be above 0"),
        ([str(project / "runs"), "--out", "/proc/none"], "error: --out /proc/none: "),
    ):
        assert report.main(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith(line) and err.count("\n") == 1, err
    with mock.patch("importlib.util.find_spec", lambda name: None):
        assert report.main([str(project / "runs")]) == results.main([]) == 2
    assert capsys.readouterr().err.count("pip install 'cleanrl-distributed[report]'") == 2
    assert os.listdir(tmp_path) == []


def test_names_are_not_markup(tmp_path):
    """Of a game, an experiment and a run: in the page, in Markdown, in matplotlib's mathematics."""
    make_run(tmp_path / "runs" / "<i>", 1, [(100, 1.0)], exp_name="$a^$ <b>|_", env_id="<u>x-v1")
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert Page(text).open == [] and not re.search("<[iub]>", text) and "&lt;u&gt;x" in text
    assert "$a^$ <b>\\|_" in (tmp_path / "out" / "scores.md").read_text()


def test_times_that_are_no_numbers(tmp_path):
    points = [("time/env", 1, 1, math.nan), ("time/env", 2, 2, 0.25), ("time/update", 1, 1, math.inf)]
    text = report.time_shares(curves.group_runs([read_events(write(tmp_path, points))]))
    assert "25.0 %" in text and "nan" not in text and "inf" not in text and "update" not in text


def test_without_rliable_the_rest_is_there(project, tmp_path):
    runs, _ = find_runs([str(project / "runs")])
    with mock.patch.dict("sys.modules", {"rliable": None}):
        text = report.aggregate_section(curves.group_runs(runs), report.Pictures(str(tmp_path)))
    assert "no aggregates, rliable can&#x27;t be imported" in text and "<img" not in text


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--total-num-envs", "16", "--batch-size", "512", "--no-anneal-lr", "--track"],
        ["--device-ids", "0", "1", "--target-kl", "0.01", "--seed", "7", "--num-envs", "3", "--run-name", "a b"],
    ],
)
def test_a_command_rebuilt_from_the_arguments_is_the_same(tmp_path, flags):
    args = parse(ppo_atari_multigpu.Args, ["--exp-name", "ppo_atari_multigpu", *flags])
    run = read_events(write(tmp_path, game(1, 1, 1.0), hyperparameters=asdict(args)))
    words = shlex.split(report.command(run))
    assert words[:2] == ["python", "ppo_atari_multigpu.py"]
    again = parse(ppo_atari_multigpu.Args, words[2:])
    ignored = {"num_envs", "num_steps"} if "--batch-size" in flags else set()  # replaced by those that were given
    assert {k: v for k, v in asdict(again).items() if k not in ignored} == {
        k: v for k, v in asdict(args).items() if k not in ignored
    }


def test_the_logger_says_how_to_repeat_the_run(tmp_path, monkeypatch):
    from cleanrl_utils.logger import Logger

    monkeypatch.chdir(tmp_path)
    script = tmp_path / "ppo_atari.py"
    script.touch()
    for words in (
        ["init", "-q"],
        ["add", "ppo_atari.py"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr("sys.argv", [str(script), "--exp-name", "a b"])
    Logger(ppo_atari.Args(exp_name="a b", env_id="PongNoFrameskip-v4"), "r", 100, {}).close()
    facts = read_events("runs/r").facts
    assert facts["command"] == "python ppo_atari.py --exp-name 'a b'" and facts["commit"] == head
    assert facts["processes"] == "1" and facts["torch"].startswith("2.") and "cores of " in facts["cpu"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_in_a_browser(project, tmp_path):
    """The page is not blank, has dark and light, and its pictures fit a narrow window."""
    assert report.main([str(project / "runs"), "--out", str(tmp_path)]) == 0
    shots = {}
    for name, flags in (("light", []), ("dark", ["--blink-settings=preferredColorScheme=0"])):
        argv = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        argv += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path}/{name}", *flags]
        argv += ["--window-size=700,2000", "--hide-scrollbars", f"--screenshot={tmp_path}/{name}.png"]
        subprocess.run([*argv, f"file://{tmp_path}/index.html"], check=True, timeout=120, capture_output=True)
        shots[name] = np.asarray(Image.open(f"{tmp_path}/{name}.png").convert("L"), float)
    assert shots["light"].mean() > 200 and shots["dark"].mean() < 60
    assert all(shot[800:].std() > 5 for shot in shots.values())


# === Kept results =====================================================================================================
def test_a_kept_run_gives_the_same_report(project, tmp_path, capsys):
    """Kept from events, read from tables: every number of fewer than 1000 iterations, and all games; built twice, the
    same bytes."""
    folders = [str(project / "runs" / f"PongNoFrameskip-v4__mine__{seed}__1") for seed in (1, 2)]
    assert results.main([*folders, "--out", str(tmp_path / "kept")]) == 0
    assert re.search(r"kept .*mine__2__1, \d KB", capsys.readouterr().out)
    before, _ = find_runs(folders)
    after, notes = find_runs([str(tmp_path / "kept")])
    assert notes == [] and [run.name for run in before] == [run.name for run in after]
    for events, kept in zip(before, after, strict=True):
        assert set(events.series) == set(kept.series)
        for tag, series in events.series.items():
            assert kept.series[tag].steps.tolist() == series.steps.tolist()
            np.testing.assert_array_equal(np.float32(kept.series[tag].values), np.float32(series.values))
            np.testing.assert_allclose(kept.series[tag].seconds, series.seconds, atol=0.05)
        assert report.command(events) == report.command(kept)
    assert report.score_table(curves.group_runs(before)) == report.score_table(curves.group_runs(after))
    about = json.loads((tmp_path / "kept" / before[0].name / "run.json").read_text())
    assert about["facts"]["date"] == "2027-01-15" and about["arguments"]["total_timesteps"] == "1000"
    page = (tmp_path / "kept" / "README.md").read_text()
    assert (
        "| PongNoFrameskip-v4 | mine | 10.00 ± 2.12 | 0.87 ± 0.06 | 2 | 600 to 1 k |" in page
        and "python mine.py --env-id" in page
    )
    for picture in re.findall(r"\]\((\S+\.png)\)", page):
        Image.open(tmp_path / "kept" / picture).load()
    files = {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    for again in ([], folders):  # at another time
        with mock.patch("time.time", lambda: START):
            assert results.main([*again, "--out", str(tmp_path / "kept")]) == 0
        assert {path: path.read_bytes() for path in files} == files


def test_a_kept_run_in_which_no_game_has_ended(tmp_path):
    run = write(tmp_path / "runs" / "PongNoFrameskip-v4__mine__1__1", [(LOSS, 100, 10, 1.0)])
    assert results.main([run, "--out", str(tmp_path / "kept")]) == 0
    page = (tmp_path / "kept" / "README.md").read_text()
    assert (
        "](" not in page and "No game has ended." in page and f"| PongNoFrameskip-v4 | mine | {report.NONE} |" in page
    )
    assert not list((tmp_path / "kept").rglob("*.png"))


def test_the_page_s_links_to_odd_names(tmp_path):
    assert results.main([write(tmp_path / "a (b)", game(1, 1, 1.0)), "--out", str(tmp_path / "kept")]) == 0
    assert "](a%20%28b%29/curve.png)" in (tmp_path / "kept" / "README.md").read_text()


def test_long_runs_are_thinned():
    """2500 points in 3s: 833 rows of means and a rest of one, at the last step of each."""
    thin = results.thinned(series(range(1, 2501), range(2500)))
    assert len(thin.steps) == 834 and thin.steps[[0, 1, -2, -1]].tolist() == [3, 6, 2499, 2500]
    assert thin.values[[0, 1, -1]].tolist() == [1.0, 4.0, 2499.0] and thin.seconds[0] == 0.3
    short = results.thinned(series([1, 2], [5, 6]))
    assert short.values.tolist() == [5, 6]


def test_what_can_not_be_kept_or_read(project, tmp_path, capsys):
    for argv, line in (
        (["nowhere"], "nowhere: 0 runs; name the folder of one run"),
        ([str(project / "runs")], "8 runs; name the folder of one run"),
        (["--out", str(tmp_path / "none")], "no kept results"),
        (["a/x", "b/x/"], "a/x: another of these runs has this name, and results/x is one's"),
    ):
        assert results.main(argv) == 2
        assert line in capsys.readouterr().err
    run = str(project / "runs" / "PongNoFrameskip-v4__mine__1__1")
    out = tmp_path / "kept"
    assert results.main([run, "--out", str(out)]) == 0
    about = json.loads((out / os.path.basename(run) / "run.json").read_text())
    for number, damage in enumerate(
        [
            lambda folder: (folder / "run.json").write_text("{"),
            lambda folder: (folder / "run.json").write_text("{}"),
            lambda folder: (folder / "run.json").write_text(json.dumps({**about, "facts": None})),
            lambda folder: (folder / "run.json").write_text(json.dumps({**about, "seed": "one"})),
            lambda folder: (folder / "games.csv.gz").unlink(),
            lambda folder: (folder / "games.csv.gz").write_bytes((folder / "games.csv.gz").read_bytes()[:-9]),
            lambda folder: (folder / "iterations.csv.gz").write_bytes(b"text"),
        ]
    ):
        shutil.copytree(out / os.path.basename(run), out / f"broken{number}")
        damage(out / f"broken{number}")
    capsys.readouterr()
    assert results.main(["--out", str(out)]) == 0
    err = capsys.readouterr().err
    assert err.count("notice: ") == err.count("is no kept result: ") == 7, err


def test_the_kept_results_of_the_repository():
    """What is in results/ can be read, is small, and its page is up to date."""
    root = os.path.join(os.path.dirname(__file__), "..", "results")
    runs, notes = find_runs([root])
    assert notes == [] and len(runs) >= 1
    for run in runs:
        size = sum(os.path.getsize(os.path.join(run.folder, f)) for f in os.listdir(run.folder))
        assert size < 300_000 and report.command(run) and run.facts["commit"] and run.facts["date"]
    with open(os.path.join(root, "README.md"), encoding="utf-8") as file:
        page = file.read()
    assert report.markdown_table(report.score_table(curves.group_runs(runs))) in page
    (pong,) = [run for run in runs if run.name == "pong-2x8-fp32-seed1"]
    assert curves.score(pong) == pytest.approx(-9.07) and len(pong.returns.values) == 1401


def test_reading_is_quick(tmp_path):
    """No scan of the records in Python per byte: 20,000 of them in a second, on a loaded machine too."""
    points = [(LOSS, step, step, 0.5) for step in range(20_000)]
    write(tmp_path, points)
    start = time.process_time()
    assert read_events(str(tmp_path)).steps == 19_999
    assert time.process_time() - start < 1.5
