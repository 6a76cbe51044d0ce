"""What a run leaves behind: event files, W&B's offline file, videos; and what the logger does on its own."""

import glob
import json
import os
import random
import re
import shutil
import struct
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import MULTI, PATIENCE, ROOT, SINGLE, command, environment, final, scalars

from cleanrl_utils.atari import VideoRecorder
from cleanrl_utils.config import Fault
from cleanrl_utils.logger import ADVICE, Logger, Stopwatch
from cleanrl_utils.process import Stopped

ITERATION_TAGS = {
    *(f"losses/{name}" for name in ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")),
    *(f"time/{part}" for part in ("env", "inference", "update", "allreduce", "checkpoint")),
    *("losses/explained_variance", "charts/learning_rate", "charts/SPS"),
}
GAME_TAGS = {"charts/episodic_return", "charts/episodic_length"}
# 3 iterations of 2 processes * 2 environments * 256 steps: Breakout's games end within some 120 steps of random play
FLAGS = ["--num-envs", 2, "--num-steps", 256, "--total-timesteps", 3 * 4 * 256, "--update-epochs", 1]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A job of two processes with W&B, offline, and videos, in a git repository."""
    from conftest import Folder

    folder = Folder(tmp_path_factory.mktemp("tracked"))
    for words in ("init -q .", "-c user.name=x -c user.email=x@x commit -q --allow-empty -m x"):
        subprocess.run(["git", *words.split()], cwd=folder.path, check=True)
    shutil.copy(ROOT / MULTI, folder.path)
    wandb_flags = ["--track", "--wandb-group", "seeds", "--wandb-tags", "one", "two"]
    script = str(folder.path / MULTI)
    argv = command(script, *FLAGS, *wandb_flags, "--capture-video", "--exp-name", "logged", nproc=2)
    folder.output = folder.run(argv, WANDB_MODE="offline")
    return folder


def test_the_event_file(tracked):
    (event_folder,) = tracked.event_folders()
    assert os.path.basename(event_folder).startswith("BreakoutNoFrameskip-v4__logged__1__")
    assert os.listdir(tracked.path / "runs") == [os.path.basename(event_folder)]
    points = scalars(event_folder)
    assert set(points) == ITERATION_TAGS | GAME_TAGS
    assert np.isfinite([value for series in points.values() for _, value in series]).all()
    for tag in ITERATION_TAGS:
        assert [step for step, _ in points[tag]] == [1024, 2048, 3072], tag
    for tag in GAME_TAGS:
        steps = [step for step, _ in points[tag]]
        assert len(steps) >= 8 and steps == sorted(steps) and all(step % 4 == 0 for step in steps)
    assert points["charts/episodic_return"][0][0] == points["charts/episodic_length"][0][0]
    parts = ("env", "inference", "update", "allreduce", "checkpoint")
    shares = np.array([[value for _, value in points[f"time/{part}"]] for part in parts])
    assert (shares >= 0).all() and np.allclose(shares.sum(0), 1, atol=1e-5) and (shares[:3] > 0).all()
    (line,) = [line for line in tracked.output.stderr.splitlines() if line.startswith("time: ")]
    said = {part: int(percent) / 100 for part, percent in re.findall(r"(\w+) (\d+)%", line)}
    assert list(said) == list(parts) and np.allclose(list(said.values()), shares.mean(1), atol=0.0051), line
    assert line.split("; ")[1] in [f"{part}: {advice}" for part, advice in ADVICE.items()], line
    assert final(tracked.output.stdout)[0] == 3072
    assert [v for _, v in points["charts/learning_rate"]] == pytest.approx([2.5e-4, 2.5e-4 * 2 / 3, 2.5e-4 / 3])


def wandb_records(file):
    """The records of a .wandb file: LevelDB's log format after 7 bytes of W&B's own."""
    from wandb.proto import wandb_internal_pb2

    data, position, whole, block = Path(file).read_bytes(), 7, b"", 32768
    while position + 7 <= len(data):
        if block - position % block < 7:  # a header does not fit into the rest of a block
            position += block - position % block
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def offline_run(folder):
    """The config, the rows and the video files of the one offline W&B run."""
    (file,) = glob.glob(f"{folder}/wandb/offline-run-*/*.wandb")
    rows, config = [], {}
    for record in wandb_records(file):
        for item in [*record.run.config.update, *record.config.update]:
            config[item.key] = json.loads(item.value_json)
        if record.history.item:
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    videos = glob.glob(f"{folder}/wandb/offline-run-*/files/media/videos/*.mp4")
    return config, rows, videos


def wandb_history(run_folder):
    """(row number, what must not depend on time) of each row of an offline run."""
    (file,) = glob.glob(f"{run_folder}/*.wandb")
    history = []
    for record in wandb_records(file):
        if record.history.item:
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            timed = ("_", "time/", "videos", "charts/SPS")
            history.append((record.history.step.num, {k: v for k, v in row.items() if not k.startswith(timed)}))
    return history


def test_the_offline_wandb_run(tracked):
    config, rows, videos = offline_run(tracked.path)
    assert config["seed"] == 1 and config["env_id"] == "BreakoutNoFrameskip-v4" and config["num_envs"] == 2
    (event_folder,) = tracked.event_folders()
    points = scalars(event_folder)
    for tag in ITERATION_TAGS | GAME_TAGS:
        sent = [(row["global_step"], row[tag]) for row in rows if tag in row]
        assert np.allclose(sent, points[tag], rtol=1e-5), tag
    on_disk = glob.glob(f"{tracked.path}/videos/*/*.mp4")
    assert len(videos) == len(on_disk) >= 2, "each video is sent once"


def test_what_the_wandb_run_says_of_itself(tracked):
    """One run of the job: group, tags, code, commit, axis, how it ended, and a summary to sort by."""
    (file,) = glob.glob(f"{tracked.path}/wandb/offline-run-*/*.wandb")
    records = list(wandb_records(file))
    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    (event_folder,) = tracked.event_folders()
    assert run.display_name == os.path.basename(event_folder) and run.project == "cleanRL"
    assert run.run_group == "seeds" and list(run.tags) == ["one", "two"]
    assert offline_run(tracked.path)[0]["world_size"] == 2
    (about,) = (record.environment for record in records if record.environment.program)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tracked.path, capture_output=True, text=True).stdout
    assert about.git.commit == head.strip()
    (code,) = glob.glob(f"{tracked.path}/wandb/offline-run-*/files/code/*.py")
    assert Path(code).read_text() == (ROOT / MULTI).read_text()
    axes = {record.metric.glob_name: record.metric.step_metric for record in records if record.metric.glob_name}
    assert axes == {"*": "global_step"}
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    summary = {}
    for record in records:
        for item in record.summary.update:
            summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    points = scalars(event_folder)
    returns = [value for _, value in points["charts/episodic_return"]][-100:]
    assert summary["global_step"] == 3072 and summary["charts/mean_return"] == pytest.approx(np.mean(returns))
    for tag in ITERATION_TAGS:
        assert summary[tag] == pytest.approx(points[tag][-1][1], rel=1e-5), tag


@pytest.mark.parametrize("error, preempting", [(Stopped("after iteration 1"), 1), (Fault("a loss is not finite"), 0)])
def test_wandb_knows_how_a_run_ended(tmp_path, monkeypatch, offline_wandb, error, preempting):
    """W&B calls a run that ended with 0 finished, others failed, or preempted if they have said so."""
    import ppo_atari

    monkeypatch.chdir(tmp_path)
    with pytest.raises(type(error)), ExitStack() as on_exit:
        on_exit.callback(Logger(ppo_atari.Args(track=True), "r", 100, {}).close)
        raise error
    offline_wandb()
    (file,) = glob.glob("wandb/offline-run-*/*.wandb")
    kinds = [record.WhichOneof("record_type") for record in wandb_records(file)]
    assert kinds.count("preempting") == preempting
    assert [record.exit.exit_code for record in wandb_records(file) if record.HasField("exit")] == [1]


def test_without_wandbs_process_the_run_goes_on(tmp_path, monkeypatch, capsys):
    """A signal to all processes ends it; then the checkpoint is still to be written."""
    import ppo_atari

    class Gone:
        id = "x"

        def log(self, *_args, **_kwargs):
            raise ConnectionResetError("Connection lost")

        mark_preempting = finish = log

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cleanrl_utils.logger._start_wandb", lambda *_args: Gone())
    os.makedirs("videos/r")
    for name in "ab":
        Path(f"videos/r/{name}.mp4").touch()
    logger = Logger(ppo_atari.Args(track=True), "r", 100, {})
    for step in (8, 16):
        logger.games([(step, 1.0, 8)])
        logger.metrics({"losses/value_loss": 1.0}, step)
    assert logger.state() == {"returns": [1.0, 1.0], "rows": 4, "wandb_id": "x"}
    with pytest.raises(Stopped), ExitStack() as on_exit:
        on_exit.callback(logger.close)
        raise Stopped("after iteration 2")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == 2 and "W&B's rows" in said[0] and "W&B's videos" in said[1], said
    assert [step for step, _ in scalars("runs/r")["charts/episodic_return"]] == [8, 16]


def frames_of(file):
    import cv2

    video, frames = cv2.VideoCapture(file), []
    while True:
        more, frame = video.read()
        if not more:
            return np.array(frames)
        frames.append(frame)


def test_videos_of_environment_0(tracked):
    assert len(os.listdir(tracked.path / "videos")) == 1, "one process records, under the job's name"
    files = sorted(glob.glob(f"{tracked.path}/videos/*/*.mp4"))
    assert [os.path.basename(f) for f in files][:2] == ["rl-video-episode-0.mp4", "rl-video-episode-1.mp4"]
    for file in files:
        frames = frames_of(file)
        assert frames.shape[1:] == (210, 160, 3) and len(frames) > 1 and frames.std() > 0


def test_a_video_of_a_run_that_ends_in_mid_game_plays(folder):
    """One environment, 20 steps: no game ends. The file has a frame for the reset and one for each step."""
    flags = ["--num-envs", 1, "--num-steps", 20, "--total-timesteps", 20, "--update-epochs", 1]
    folder.run(command(SINGLE, *flags, "--capture-video", "--env-id", "PongNoFrameskip-v4"))
    (file,) = glob.glob(f"{folder.path}/videos/*/*.mp4")
    assert len(frames_of(file)) == 21


def test_the_recorder(tmp_path):
    """Games 0, 1, 8, 27, ...; a cap on the length; a file that was never closed plays too."""
    recorder = VideoRecorder(str(tmp_path), max_frames=5)
    frame = np.random.default_rng(0).integers(0, 255, (210, 160, 3), dtype=np.uint8)
    for _ in range(28):
        recorder.new_game()
        for _ in range(7):
            recorder.frame(frame)
    recorder.close()
    assert sorted(os.listdir(tmp_path)) == [f"rl-video-episode-{n}.mp4" for n in (0, 1, 27, 8)]
    assert all(len(frames_of(str(tmp_path / f))) == 5 for f in os.listdir(tmp_path))
    recorder.game = 999
    assert not recorder.wanted()
    recorder.game = 1000
    assert recorder.wanted()
    recorder.game = 1331
    assert not recorder.wanted()


def test_without_an_encoder_the_run_goes_on_without_videos(tmp_path, capsys):
    """A signal to all processes ends it, and so does a full disk."""
    frame = np.zeros((210, 160, 3), np.uint8)
    recorder = VideoRecorder(str(tmp_path / "killed"))
    recorder.new_game()
    recorder.frame(frame)
    encoder = recorder._writer.gi_frame.f_locals["p"]
    encoder.kill()
    encoder.wait()
    for _ in range(10):
        recorder.frame(frame)
    recorder.close()
    (tmp_path / "file").write_text("")
    recorder = VideoRecorder(str(tmp_path / "file" / "videos"))
    recorder.new_game()
    recorder.frame(frame)
    recorder.frame(frame)
    recorder.close()
    said = capsys.readouterr().err.splitlines()
    assert [line[:24] for line in said] == ["warning: no more videos:"] * 2, said
    assert "Broken pipe" in said[0] and "Not a directory" in said[1]


def test_the_same_command_twice_gives_identical_scalars(folder):
    flags = ["--num-envs", 3, "--num-steps", 128, "--total-timesteps", 3 * 3 * 128, "--update-epochs", 1]
    runs = [folder.run(command(SINGLE, *flags)) for _ in range(2)]
    first, second = map(scalars, folder.event_folders())
    assert runs[0].stdout == runs[1].stdout
    for tag in (ITERATION_TAGS | GAME_TAGS) - {"charts/SPS"}:
        if not tag.startswith("time/"):
            assert first[tag] == second[tag], tag


NO_KEY = "error: --track: no key; give one to `wandb login` or in WANDB_API_KEY; or set WANDB_MODE=offline"


def test_no_key_is_one_line_on_one_process_and_ends_all(folder):
    argv = command(MULTI, "--track", nproc=2)
    done = folder.run(argv, code=1, HOME=str(folder.path), WANDB_API_KEY="")
    assert done.stderr.count("error: ") == 1 and NO_KEY in done.stderr
    assert "exitcode  : 2" in done.stderr and "exitcode  : 1 " not in done.stderr
    assert glob.glob(f"{folder.path}/[rvw]*") == []


def test_no_key_and_a_terminal_asks_nothing(folder):
    """The other processes of a job would wait for the answer."""
    import pty

    terminal, end = pty.openpty()
    env = environment(HOME=str(folder.path), WANDB_API_KEY="")
    started = subprocess.Popen(command(SINGLE, "--track"), cwd=folder.path, env=env, stdin=end, stdout=end, stderr=end)
    os.close(end)
    assert started.wait(timeout=PATIENCE) == 2
    assert os.read(terminal, 10_000).decode().strip() == NO_KEY
    os.close(terminal)


def test_an_unknown_wandb_mode_is_one_line(folder):
    done = folder.run(command(SINGLE, "--track"), code=2, WANDB_MODE="later")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: --track: ") and "'later'" in done.stderr


def test_run_folders_are_never_shared(tmp_path, monkeypatch):
    import ppo_atari
    from cleanrl_utils.checkpoint import make_run_folder

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.time", lambda: 1000.5)
    names = [make_run_folder(ppo_atari.Args(exp_name="x"), "ALE/Pong-v5") for _ in range(3)]
    assert names == [f"ALE-Pong-v5__x__1__{second}" for second in (1000, 1001, 1002)]
    assert make_run_folder(ppo_atari.Args(exp_name="../../../y"), "ALE/Pong-v5").endswith("__..-..-..-y__1__1000")


def test_games_are_logged_in_order(tmp_path, monkeypatch):
    import ppo_atari

    monkeypatch.chdir(tmp_path)
    logger = Logger(ppo_atari.Args(), "r", 100, {})
    games = [(step, float(i), i) for i, step in enumerate([8, 8, 4, 12, 4])]
    random.Random(0).shuffle(games)
    logger.games(games)
    logger.close()
    points = scalars("runs/r")["charts/episodic_return"]
    assert [step for step, _ in points] == [4, 4, 8, 8, 12]
    assert points == [(step, value) for step, value, _ in sorted(games, key=lambda g: g[0])]


@pytest.mark.parametrize(
    ("shares", "part"),
    [
        ({"env": 0.5, "inference": 0.2, "update": 0.3, "allreduce": 0.0, "checkpoint": 0.0}, "env"),
        ({"env": 0.3, "inference": 0.2, "update": 0.42, "allreduce": 0.08, "checkpoint": 0.0}, "update"),
        # what is no work at all is named from a fifth of the largest part on
        ({"env": 0.3, "inference": 0.2, "update": 0.4, "allreduce": 0.1, "checkpoint": 0.0}, "allreduce"),
        ({"env": 0.3, "inference": 0.2, "update": 0.4, "allreduce": 0.0, "checkpoint": 0.1}, "checkpoint"),
    ],
)
def test_advice_at_the_end(shares, part, tmp_path, monkeypatch, capsys):
    import ppo_atari

    monkeypatch.chdir(tmp_path)
    logger = Logger(ppo_atari.Args(), "r", 200, {})
    for step in (100, 200):
        logger.metrics({f"time/{name}": share for name, share in shares.items()}, step)
    logger.final(200, 1.0)
    logger.close()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("time: ")]
    said = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    assert line == f"time: {said}; {part}: {ADVICE[part]}"


def test_the_stopwatch_charges_all_time(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 5.0, 5.0, 7.0])
    monkeypatch.setattr("cleanrl_utils.logger.time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = Stopwatch("env", "update")
    for part in ("env", "update", "env"):
        clock.lap(part)
    assert clock.shares() == {"env": 0.4, "update": 0.6}
    clock.lap("env")
    clock.lap("update")
    assert clock.shares() == {"env": 0.0, "update": 1.0}
