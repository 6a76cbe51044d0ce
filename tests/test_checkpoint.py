"""Nothing is lost: an interrupted run is the uninterrupted one, and no file can end or mislead it."""

import glob
import io
import os
import random
import shutil
import socket
import sys
import time

import numpy as np
import pytest
import torch
from conftest import (
    MULTI,
    PATIENCE,
    ROOT,
    SINGLE,
    SMALL,
    alive,
    children,
    command,
    final,
    kill_group,
    scalars,
    wait_until,
)

from cleanrl_utils.atari import AtariGame, finished_games, make_vector
from cleanrl_utils.checkpoint import FORMAT, PLAYABLE, VERSION, WHOLE, CheckpointFolder, Unreadable
from cleanrl_utils.config import Fault, UsageError

ITERATIONS, NUM_STEPS = 12, 32
# Short games in short iterations: 2 * 2 environments, of Breakout
FLAGS = [*("--num-envs", 2, "--num-steps", NUM_STEPS, "--num-minibatches", 2, "--update-epochs", 2), "--num-threads", 1]
TOTAL = ["--total-timesteps", ITERATIONS * 4 * NUM_STEPS]
NAMED = [*FLAGS, *TOTAL, "--run-name", "run", "--checkpoint-every", 2]


def logged(folder, run="run"):
    """All of a run's scalars but those of time."""
    points = scalars(f"{folder.path}/runs/{run}")
    return {tag: series for tag, series in points.items() if tag != "charts/SPS" and not tag.startswith("time/")}


def checkpoints(folder, run="run"):
    return sorted(glob.glob(f"{folder.path}/runs/{run}/checkpoint-*"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that nothing happened to: (its folder, its last line)."""
    from conftest import Folder

    folder = Folder(tmp_path_factory.mktemp("straight"))
    return folder, final(folder.run(command(MULTI, *NAMED, nproc=2)).stdout)


# ---- the state of a game ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("env_id", ["BreakoutNoFrameskip-v4", "ALE/Pong-v5", "QbertNoFrameskip-v4"])
def test_games_go_on_from_their_state(env_id, kind, tmp_path):
    def thunk(seed):
        return lambda: AtariGame(env_id, seed, max_episode_frames=1600)

    first, second = (make_vector([thunk(seed + i) for i in range(2)], kind) for seed in (7, 70))
    try:
        rng = np.random.default_rng(0)
        first.reset()
        for _ in range(150):
            first.step(rng.integers(0, first.single_action_space.n, 2))
        torch.save(list(first.get_attr("state")), tmp_path / "state")
        second.set_attr("state", torch.load(tmp_path / "state", weights_only=True))
        games = 0
        for _ in range(500):
            actions = rng.integers(0, first.single_action_space.n, 2)
            there, here = first.step(actions), second.step(actions)
            assert all(np.array_equal(x, y) for x, y in zip(there[:4], here[:4], strict=True))
            assert finished_games(there[4]) == finished_games(here[4])
            games += len(finished_games(there[4]))
        assert games >= 2
    finally:
        first.close()
        second.close()


def test_a_sticky_action_is_remembered():
    """Which action the next frame may repeat isn't in the emulator's state. With one frame a step it often is another
    than the last one that was asked for."""
    others = 0
    there, here = (AtariGame("ALE/Breakout-v5", frame_skip=1) for _ in range(2))
    for seed in range(30):
        rng = np.random.default_rng(seed)
        there.reset(seed=seed)
        for _ in range(60 + seed):
            if there.step(rng.integers(4))[2]:
                there.reset()
        here.state = state = there.state
        others += state["last_action"] != there._asked.value
        for _ in range(8):
            action = rng.integers(4)
            there.step(action)
            here.step(action)
            assert there._emulator() == here._emulator()
    assert others >= 1


# ---- the file --------------------------------------------------------------------------------------------------------
def test_the_file(straight):
    folder, (global_step, param_sum) = straight
    files = checkpoints(folder)
    assert [os.path.basename(file) for file in files] == [f"checkpoint-{i:08}.pt" for i in (8, 10, 12)], "the newest 3"
    state = torch.load(files[-1], weights_only=True)
    assert state["iteration"] == ITERATIONS and state["global_step"] == global_step == ITERATIONS * 4 * NUM_STEPS
    assert sum(w.double().sum().item() for w in state["agent"].values()) == pytest.approx(param_sum, abs=1e-9)
    assert len(state["envs"]) == 4 and all(len(env["emulator"]) > 10_000 for env, _, _ in state["envs"])
    adam = state["optimizer"]["state"][0]
    assert adam["step"] == ITERATIONS * 4 and adam["exp_avg"].abs().sum() > 0 and adam["exp_avg_sq"].abs().sum() > 0
    assert state["optimizer"]["param_groups"][0]["eps"] == 1e-5
    assert state["machine"]["processes"] == 2 and state["machine"]["torch"] == torch.__version__


def damaged(kind, data, rng):
    if kind == "empty":
        return b""
    if kind == "truncated":
        return data[: rng.randrange(1, len(data))]
    if kind == "foreign":
        return rng.randbytes(5000)
    if kind == "other archive":
        import io

        out = io.BytesIO()
        torch.save({"model": torch.zeros(3)}, out)
        return out.getvalue()
    flipped = bytearray(data)
    flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def test_a_damaged_file_is_never_taken(straight, tmp_path):
    """Either it says that it is damaged or, where the flipped bit pads the file, it holds the very state."""
    (*_, newest) = checkpoints(straight[0])
    with open(newest, "rb") as file:
        data = file.read()
    right = torch.load(newest, weights_only=True)
    rng, folder, refused = random.Random(1), CheckpointFolder(str(tmp_path)), 0
    for kind in [*["empty", "foreign", "other archive"], *["truncated"] * 10, *["flipped"] * 40]:
        (tmp_path / "file").write_bytes(damaged(kind, data, rng))
        try:
            state = folder.read(str(tmp_path / "file"))
        except Unreadable as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert kind == "flipped"
            assert repr(state) == repr(right)
            assert all(torch.equal(state["agent"][name], right["agent"][name]) for name in right["agent"])
    assert refused >= 45


def test_which_checkpoint_is_the_newest(straight, tmp_path, capsys):
    (*_, newest) = checkpoints(straight[0])
    with open(newest, "rb") as file:
        data = file.read()
    folder = CheckpointFolder(str(tmp_path / "run"))
    assert folder.files() == [] and folder.newest() is None
    for iteration in (90, 100):
        folder.write(f"checkpoint-{iteration:08}.pt", data)
    (tmp_path / "run" / "checkpoint-00000110.pt").write_bytes(data[:-100])
    (tmp_path / "run" / "checkpoint-00000120.pt.tmp").write_bytes(data[:100])  # of a process that was killed
    assert folder.newest()["iteration"] == ITERATIONS
    assert capsys.readouterr().err.startswith(f"warning: skipped {tmp_path}/run/checkpoint-00000110.pt: ")
    folder.write("checkpoint-00000120.pt", data)
    assert [path[-10:] for path in folder.files()] == ["0000100.pt", "0000110.pt", "0000120.pt"]
    for path in folder.files():
        with open(path, "wb"):
            pass
    with pytest.raises(Fault, match=r"none of the 3 checkpoints in .* can be read"):
        folder.newest()
    state = torch.load(newest, weights_only=True)
    torch.save({**state, "version": 2}, tmp_path / "run" / "checkpoint-00000130.pt")
    with pytest.raises(UsageError, match="newer version"):
        folder.newest()


def save(file, **changes):
    """A small whole checkpoint, but for the changes; None: the part is missing."""
    state = {"format": FORMAT, "version": VERSION, **{part: kind() for part, kind in WHOLE.items()}, **changes}
    torch.save({part: value for part, value in state.items() if value is not None}, file)


@pytest.mark.parametrize("value", [None, 1.5])
def test_what_is_no_whole_checkpoint_is_skipped(value, tmp_path, capsys):
    """The checksums are right, the content is not."""
    folder = CheckpointFolder(str(tmp_path))
    save(tmp_path / "checkpoint-00000001.pt", iteration=1)
    for part in WHOLE:
        save(tmp_path / "checkpoint-00000002.pt", iteration=2)
        assert folder.newest(WHOLE)["iteration"] == 2 and capsys.readouterr().err == ""
        save(tmp_path / "checkpoint-00000002.pt", **{"iteration": 2, part: value})
        assert folder.newest(WHOLE)["iteration"] == 1
        assert f"checkpoint-00000002.pt: not a whole checkpoint: {part}\n" in capsys.readouterr().err
        folder.newest()
        assert (capsys.readouterr().err == "") == (part not in PLAYABLE), part
    save(tmp_path / "checkpoint-00000002.pt", version=value)
    assert folder.newest(WHOLE)["iteration"] == 1


def test_a_folder_in_the_place_of_a_checkpoint(tmp_path, capsys):
    """It is skipped as damaged, and does not keep older files from being removed."""
    for iteration in range(2, 6):
        save(tmp_path / f"checkpoint-{iteration:08}.pt", iteration=iteration)
    (tmp_path / "checkpoint-00000001.pt" / "inner").mkdir(parents=True)
    (tmp_path / "checkpoint-00000006.pt").mkdir()
    folder = CheckpointFolder(str(tmp_path))
    assert folder.newest()["iteration"] == 5
    assert "checkpoint-00000006.pt: IsADirectoryError" in capsys.readouterr().err
    folder.write("checkpoint-00000007.pt", b"x")
    assert sorted(name[-4:-3] for name in os.listdir(tmp_path)) == ["1", "5", "6", "7"]


# ---- the run ---------------------------------------------------------------------------------------------------------
def attempt(folder, *flags, what="nothing", rank=0, count=0, nproc=2, code=None):
    """Start the run or continue it; what is to happen happens. The ended process, with nobody left of it."""
    argv = command("tests/killed_run.py", ROOT / MULTI, what, rank, count, *NAMED, "--resume", *flags, nproc=nproc)
    job = folder.start(argv)
    family = set()
    try:
        while job.poll() is None:
            family.update(children(job.pid))
            time.sleep(0.2)
        job.out, job.err = job.communicate()
        wait_until(lambda: not any(map(alive, family)), 30, "nobody is left")
    finally:
        kill_group(job)
    assert code is None or job.returncode == code, job.err
    return job


def survive(folder, kills):
    """The run with kills: its last line. Each (what, rank, count) is one start."""
    for what, rank, count in kills:
        job = attempt(folder, what=what, rank=rank, count=count)
        assert job.returncode != 0, f"{what} {rank} {count} did not happen:\n{job.err}"
        if what == "term":
            assert "stopped after iteration" in job.err, job.err
    return final(attempt(folder, code=0).out)


def test_a_run_with_kills_is_the_run_without(folder, straight):
    kills = [("worker", 1, 70), ("rename", 0, 2), ("torchrun", 0, 50), ("term", 1, 40)]
    assert survive(folder, kills) == straight[1]
    assert logged(folder) == logged(straight[0])
    assert len(logged(folder)["charts/episodic_return"]) >= 4


@pytest.mark.slow
def test_twenty_kills(folder):
    """A seeded schedule: 6 workers, 4 torchruns, 4 SIGTERMs, 6 between the write and the rename."""
    rng = random.Random(2026)
    kinds = ["worker"] * 6 + ["torchrun"] * 4 + ["term"] * 4 + ["rename"] * 6
    rng.shuffle(kinds)
    kills = [(kind, 0 if kind == "rename" else rng.randrange(2), 1) for kind in kinds]
    kills = [(kind, rank, 1 + rng.randrange(2) if kind == "rename" else rng.randint(1, 96)) for kind, rank, _ in kills]
    print(*kills, sep="\n")
    longer = ["--total-timesteps", 40 * 4 * NUM_STEPS]
    for what, rank, count in kills:
        assert attempt(folder, *longer, what=what, rank=rank, count=count).returncode != 0
    last = final(attempt(folder, *longer, code=0).out)
    folder.run(command(MULTI, *NAMED, *longer, "--run-name", "straight", nproc=2))
    assert logged(folder) == logged(folder, "straight")
    (*_, file), (*_, other) = checkpoints(folder), checkpoints(folder, "straight")
    state, right = torch.load(file, weights_only=True), torch.load(other, weights_only=True)
    assert all(torch.equal(state["agent"][name], right["agent"][name]) for name in right["agent"])
    assert last[0] == 40 * 4 * NUM_STEPS


FAULTS = {
    "nothing": lambda state: None,
    "numpy's generator": lambda state: [env.update(generators=fresh_generators()) for env, _, _ in state["envs"]],
    "the stack of frames": lambda state: [env["stack"].zero_() for env, _, _ in state["envs"]],
    "Adam's step": lambda state: [adam["step"].zero_() for adam in state["optimizer"]["state"].values()],
    "the noise": lambda state: state.update(generator=torch.Generator().manual_seed(0).get_state()),
    "the pending observation": lambda state: [obs.zero_() for _, obs, _ in state["envs"]],
    "the score so far": lambda state: [env.update(_return=0.0, _length=0) for env, _, _ in state["envs"]],
}


def fresh_generators():
    return [np.random.default_rng(i).bit_generator.state for i in range(3)]


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """3 of 9 iterations, the checkpoint, and all 9 in one go."""
    from conftest import Folder

    folder = Folder(tmp_path_factory.mktemp("half"))
    flags = ["--num-envs", 2, "--num-steps", 128, "--update-epochs", 1, "--no-anneal-lr"]
    folder.run(command(SINGLE, *flags, "--total-timesteps", 3 * 256, "--run-name", "half"))
    (whole,) = folder.recorded(SINGLE, "whole", *flags, "--total-timesteps", 9 * 256, "--run-name", "whole")
    return folder, flags, whole


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_checkpoint_lacked_would_be_noticed(half, fault, folder):
    """Only the faultless checkpoint gives the run that was never stopped."""
    before, flags, whole = half
    (file,) = checkpoints(before, "half")
    state = torch.load(file, weights_only=True)
    FAULTS[fault](state)
    os.makedirs(folder.path / "runs" / "half")
    torch.save(state, folder.path / "runs" / "half" / os.path.basename(file))
    flags = [*flags, "--total-timesteps", 9 * 256, "--run-name", "half", "--resume"]
    (rest,) = folder.recorded(SINGLE, "rest", *flags)
    same = np.array_equal(rest["actions"], whole["actions"][3 * 128 :]) and np.array_equal(
        rest["params"], whole["params"][3:]
    )
    games = {tag: [p for p in points if p[0] > 768] for tag, points in logged(before, "whole").items()}
    assert len(games["charts/episodic_return"]) >= 2
    same = same and games == logged(folder, "half")
    assert same == (fault == "nothing")


@pytest.mark.parametrize("processes", [[1, 2, 3, 1]])
def test_the_number_of_processes_may_change(folder, processes):
    """Environments are dealt out anew, also unevenly, and the run stays the same run."""
    flags = [*SMALL, "--no-anneal-lr", "--total-num-envs", 4, "--learning-rate", 1e-4, "--num-threads", 1]
    batch, parts = 4 * 16, []
    for i, nproc in enumerate(processes, 1):
        named = ["--total-timesteps", 5 * i * batch, "--run-name", "r", "--resume"]
        records = folder.recorded(MULTI, f"part{i}", *flags, *named, nproc=nproc)
        parts.append((np.concatenate([r["actions"] for r in records], axis=1), records[0]["params"]))
        # TensorBoard takes a folder's files in the order of their names: of the second in it, and then of the process
        second = max(int(path.name.split(".")[3]) for path in (folder.path / "runs" / "r").glob("events*"))
        wait_until(lambda end=second + 1: time.time() >= end, PATIENCE, "the next second")
    (whole,) = folder.recorded(MULTI, "whole", *flags, "--total-timesteps", 5 * len(processes) * batch)
    assert np.array_equal(np.concatenate([actions for actions, _ in parts]), whole["actions"])
    for i, (_, params) in enumerate(parts):
        assert np.abs(params - whole["params"][5 * i : 5 * i + 6]).max() < 1e-4
    points = scalars(f"{folder.path}/runs/r")
    assert [step for step, _ in points["charts/SPS"]] == [batch * i for i in range(1, 5 * len(processes) + 1)]


def test_a_finished_run_has_nothing_to_do(folder, straight, capsys):
    os.symlink(straight[0].path / "runs", folder.path / "runs")
    before = logged(folder)
    assert run_script(folder, "--num-envs", 4, *NAMED[2:], "--resume") == 0
    assert final(capsys.readouterr().out) == straight[1] and logged(folder) == before


def test_weights_only_start_a_new_run(folder, straight, capsys):
    (*_, newest) = checkpoints(straight[0])
    flags = [*SMALL, "--num-envs", 2, "--total-timesteps", 32, "--learning-rate", 1e-9, "--init-from", newest]
    assert run_script(folder, *flags) == 0
    global_step, param_sum = final(capsys.readouterr().out)
    assert global_step == 32 and param_sum == pytest.approx(straight[1][1], abs=1e-2)
    state = torch.load(glob.glob(f"{folder.path}/runs/*/checkpoint-*")[0], weights_only=True)
    assert state["optimizer"]["state"][0]["step"] == 4 and state["iteration"] == 1
    assert run_script(folder, *flags, "--env-id", "PongNoFrameskip-v4") == 2
    assert "error: the checkpoint has another network: actor.bias (4,) there, (6,) here" in capsys.readouterr().err


def test_what_may_not_change(folder, straight, capsys):
    """One line names every difference, and nothing is touched."""
    os.symlink(straight[0].path / "runs", folder.path / "runs")
    before = sorted(os.listdir(folder.path / "runs" / "run"))
    same = ["--num-envs", 4, *NAMED[2:], "--resume"]
    for flags, says in {
        ("--gamma", 0.9): "--gamma 0.9: the run to continue has 0.99",
        ("--seed", 2, "--env-id", "PongNoFrameskip-v4"): "--env-id PongNoFrameskip-v4: the run to continue has "
        "BreakoutNoFrameskip-v4; --seed 2: the run to continue has 1",
        ("--num-envs", 5): "--total-num-envs 5: the run to continue has 4",
        ("--num-steps", 64): "--num-steps 64: the run to continue has 32",
        ("--no-resume",): "--run-name run: runs/run exists; --resume continues it, or choose another name",
    }.items():
        assert run_script(folder, *same, *flags) == 2
        assert capsys.readouterr().err == f"error: {says}\n"
    assert sorted(os.listdir(folder.path / "runs" / "run")) == before


def run_script(folder, *flags):
    """The multi-GPU script as one process, in this one: its exit code."""
    import ppo_atari_multigpu as script

    def run():
        sys.argv = ["ppo", *map(str, flags)]
        script.process.run(script.main, script.Args, script.__file__)

    return folder.here(run)


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(folder, straight):
    """RLIMIT_FSIZE ends a write as a full disk does: with an error, in the middle of the file."""
    os.makedirs(folder.path / "runs" / "run")
    good, *_ = checkpoints(straight[0])
    shutil.copy(good, folder.path / "runs" / "run")
    script = command(MULTI, "--num-envs", 4, *NAMED[2:], "--resume")
    done = folder.run(["bash", "-c", 'ulimit -f 10000; exec "$@"', "-", *script])
    assert done.stderr.count("warning: no checkpoint of iteration") == 2 and "File too large" in done.stderr
    assert final(done.stdout)[0] == straight[1][0]
    left = os.listdir(folder.path / "runs" / "run")
    assert [name for name in left if name.startswith("checkpoint")] == ["checkpoint-00000008.pt"]
    assert CheckpointFolder(str(folder.path / "runs" / "run")).newest()["iteration"] == 8


def test_weights_only_survive_a_restart_before_the_first_checkpoint(folder, straight, monkeypatch, capsys):
    """And the sizes of the job do, which the command line alone would change with the number of processes."""
    import ppo_atari_multigpu as script
    from cleanrl_utils import checkpoint

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch")
    args = script.Args(run_name="new", init_from=str(checkpoints(straight[0])[-1]), num_envs=4)

    def start():
        args_now, saved = checkpoint.load_checkpoint(args)
        checkpoint.make_run_folder(args_now, args_now.env_id)
        starts.append((args_now.total_num_envs, saved.keys()))
        sys.exit(0)

    starts = []
    assert folder.here(start) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert folder.here(start) == 0
    assert starts == [(None, {"agent"}), (4, {"agent"})]
    assert "notice: restarted by torchrun" in capsys.readouterr().err


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    folder = CheckpointFolder(str(tmp_path))
    for name in ("checkpoint-best.pt", "checkpoint-0.pt", "notes.txt", "checkpoint-00000001.pt.tmp"):
        (tmp_path / name).write_text("")
    (tmp_path / "checkpoint-dir.pt").mkdir()
    assert folder.newest() is None
    for iteration in range(2, 8):
        folder.write(f"checkpoint-{iteration:08}.pt", b"x")
    kept = [f"checkpoint-{iteration:08}.pt" for iteration in (5, 6, 7)]
    assert sorted(os.listdir(tmp_path)) == sorted(
        [*kept, "checkpoint-best.pt", "checkpoint-0.pt", "checkpoint-dir.pt", "notes.txt"]
    )


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_nobody_reads_what_the_run_says(folder, monkeypatch, capsys):
    """A full disk under stderr, or a `tee` that Ctrl-C has ended: the run goes on to its end."""
    monkeypatch.setattr(sys, "stderr", Full())
    flags = [*SMALL, "--num-envs", 2, "--total-timesteps", 32, "--run-name", "quiet"]
    assert run_script(folder, *flags) == 0
    assert final(capsys.readouterr().out)[0] == 32 and len(checkpoints(folder, "quiet")) == 1


def test_a_full_disk_costs_points_and_not_the_run(tmp_path, monkeypatch, capsys):
    import ppo_atari
    from cleanrl_utils.logger import Logger

    monkeypatch.chdir(tmp_path)
    logger = Logger(ppo_atari.Args(), "run", 100, {})

    def full(*_args):
        raise OSError(28, "No space left on device")

    for call in ("add_scalar", "flush", "close"):
        monkeypatch.setattr(logger._writer, call, full)
    logger.metrics({"losses/value_loss": 1.0}, 8)
    logger.games([(8, 1.0, 1)])
    logger.flush()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", full)  # where some file systems say it
    logger.flush()
    logger.close()
    assert capsys.readouterr().err.count("warning: TensorBoard's events of this start can't be written") == 1


def test_videos_may_begin_in_a_continued_run(folder):
    flags = ["--num-envs", 1, "--num-steps", 32, "--no-anneal-lr", "--run-name", "v"]
    assert run_script(folder, *flags, "--total-timesteps", 32) == 0
    assert run_script(folder, *flags, "--total-timesteps", 64, "--resume", "--capture-video") == 0
    assert os.listdir(folder.path / "videos" / "v") == ["rl-video-episode-0.mp4"]


def test_videos_and_wandb_go_on(folder, offline_wandb):
    """The same W&B run with the same rows, a folder an attempt; the rest of a game has a file of its own."""
    from test_logging import wandb_history

    flags = [*("--num-envs", 2, "--num-steps", 32, "--no-anneal-lr", "--track", "--capture-video")]
    for name, total in (("r", 128), ("r", 256), ("whole", 256)):
        assert run_script(folder, *flags, "--run-name", name, "--total-timesteps", total, "--resume") == 0
    offline_wandb()
    first, second, whole = sorted(glob.glob(f"{folder.path}/wandb/offline-run-*"), key=os.path.getmtime)
    assert first.rpartition("-")[2] == second.rpartition("-")[2] != whole.rpartition("-")[2]
    rows = [wandb_history(attempt) for attempt in (first, second, whole)]
    assert rows[0] + rows[1] == rows[2] and len(rows[1]) >= 2
    names = [set(os.listdir(f"{folder.path}/videos/{name}")) for name in ("r", "whole")]
    (rest,) = names[0] - names[1]
    assert "-from-" in rest and names[1] <= names[0]
    sent = [file for attempt in (first, second) for file in glob.glob(f"{attempt}/files/media/videos/*.mp4")]
    assert len(sent) == len(names[0] - {".sent"}), "each video is sent once, also in a continued run"


# ---- an object store -------------------------------------------------------------------------------------------------
@pytest.fixture
def store():
    """The settings by which AWS's libraries find a local stand-in of S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    yield {**keys, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    server.stop()


def test_checkpoints_in_an_object_store_outlive_the_machine(folder, straight, store, monkeypatch):
    """The run goes on where neither runs/ nor any other file of the first machine is."""
    import boto3
    import fsspec

    for key, value in store.items():
        monkeypatch.setenv(key, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    flags = [*NAMED, "--checkpoint-dir", "s3://bucket/checkpoints", "--resume"]
    argv = command("tests/killed_run.py", ROOT / MULTI, "worker", 1, 7 * NUM_STEPS + 5, *flags, nproc=2)
    folder.run(argv, code=1, **store)
    (folder.path / "runs").rename(folder.path / "lost")
    files = CheckpointFolder("s3://bucket/checkpoints/run")
    names = files.files()
    assert [os.path.basename(name) for name in names] == [f"checkpoint-{i:08}.pt" for i in (2, 4, 6)]
    files.fs.pipe_file(names[-1], files.fs.cat_file(names[-1])[:-1000])  # a damaged one, for the one before
    done = folder.run(command(MULTI, *flags, nproc=2), **store)
    assert "warning: skipped bucket/checkpoints/run/checkpoint-00000006.pt" in done.stderr
    assert "run: runs/run, from step 512" in done.stderr and final(done.stdout) == straight[1]
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_store_that_does_not_answer_costs_checkpoints_and_nothing_else(folder, store, monkeypatch):
    """Nor refuses: the client itself would wait for a minute and more."""
    import ppo_atari
    from cleanrl_utils import checkpoint
    from cleanrl_utils.logger import NullLogger

    silent = socket.create_server(("127.0.0.1", 0))
    for key, value in {**store, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}.items():
        monkeypatch.setenv(key, value)
    said = []
    logger = NullLogger()
    logger.run_name, logger.say = "run", said.append
    monkeypatch.setattr(checkpoint, "WRITE_LIMIT", 2.0)
    args = ppo_atari.Args(run_name="run", checkpoint_dir="s3://bucket/checkpoints")
    checkpoint.save_checkpoint(args, logger, 1, 8, [], {})
    assert said == ["warning: no checkpoint of iteration 1: not written within 2 s"]
    silent.close()
