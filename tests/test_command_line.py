"""Each bad command line is one clear line, exit code 2, and nothing made."""

import itertools
import os
import sys
from pathlib import Path

import pytest
from conftest import MULTI, command

import ppo_atari
import ppo_atari_multigpu
from cleanrl_utils import evaluate, process

# flags -> what the line must say
BAD = {
    "--learning-rate -1": "--learning-rate -1.0: must be above 0",
    "--learning-rate nan": "--learning-rate nan: must be above 0",
    "--learning-rate fast": "--learning-rate",
    "--num-steps 0": "--num-steps 0: must be above 0",
    "--num-steps 1e3": "--num-steps",
    "--gamma 1.5": "--gamma 1.5: must be between 0 and 1",
    "--gae-lambda -0.1": "--gae-lambda -0.1: must be between 0 and 1",
    "--local-num-envs 0": "--num-envs 0: must be above 0",
    "--num-envs -2": "--num-envs -2: must be above 0",
    "--num-envs": "--num-envs",
    "--seed -1": "--seed -1: must be 0 or above",
    "--clip-coef -0.1": "--clip-coef -0.1: must be 0 or above",
    "--ent-coef inf": "--ent-coef inf: must be 0 or above",
    "--max-grad-norm 0": "--max-grad-norm 0.0: must be above 0",
    "--update-epochs 0": "--update-epochs 0: must be above 0",
    "--target-kl 0": "--target-kl 0.0: must be above 0",
    "--lr-warmup-iterations -1": "--lr-warmup-iterations -1: must be 0 or above",
    "--num-threads 0": "--num-threads 0: must be above 0",
    "--total-timesteps 0": "--total-timesteps 0: must be above 0",
    "--total-timesteps 1000": "--total-timesteps 1000: must be at least the 1024 of one iteration",
    "--num-minibatches 0": "--num-minibatches 0: must be above 0",
    "--num-minibatches 5": "--num-minibatches 5: must divide the 128 steps per env",
    "--num-envs 1 --num-steps 5 --num-minibatches 2": "--num-minibatches 2: must divide the 5 steps per env",
    "--num-envs 1 --num-steps 8 --num-minibatches 8": "--num-minibatches 8: leaves minibatches of 1 transition",
    "--grad-accumulation-steps 0": "--grad-accumulation-steps 0: must be above 0",
    "--grad-accumulation-steps 257": "--grad-accumulation-steps 257: must be at most the 256 transitions",
    "--batch-size 1001": "--batch-size 1001: must be a multiple of the 8 envs",
    "--batch-size 1024 --num-steps 128": "--num-steps",
    "--env-id BreakoutNoFrameskp-v4": "did you mean BreakoutNoFrameskip-v4",
    "--env-id CartPole-v1": "--env-id CartPole-v1: must be an Atari game",
    "--env-id xyz": "--env-id xyz: must be an Atari game",
    "--vector-env threads": "--vector-env",
    "--track True": "--track True: takes no value; write --track or --no-track",
    "--cuda=False": "--cuda False: takes no value; write --cuda or --no-cuda",
    "--capture_video False": "--capture-video False: takes no value",
    "--anneal-lr 1": "--anneal-lr 1: takes no value",
    "--wandb-tags a --wandb-tags b": "--wandb-tags: is there twice; write --wandb-tags ONE TWO",
    "--run-name ../elsewhere": "--run-name '../elsewhere': must be a name",
    "--run-name /tmp/x": "--run-name '/tmp/x': must be a name",
    "--run-name .": "--run-name '.': must be a name",
    "--run-name a//b": "--run-name 'a//b': must be a name",
    "--run-name=": "--run-name '': must be a name",
    "--run-name a\x1bb": "--run-name 'a\\x1bb': must be without line breaks",
    "--exp-name a\udcffb": "--exp-name 'a\\udcffb': must be without line breaks",
    "--no-such-flag 3": "--no-such-flag",
    "--run-name a::b": "--run-name 'a::b': must be without a colon",
    "--checkpoint-dir=": "--checkpoint-dir '': must be a folder or a URL",
    "--resume": "--resume: needs the --run-name of the run to continue",
    "--checkpoint-every -1": "--checkpoint-every -1: must be 0 or above",
    "--checkpoint-dir nowhere://x": "--checkpoint-dir: nowhere://x: ValueError: Protocol not known",
    "--init-from nowhere://x": "--init-from: nowhere://x: ValueError: Protocol not known",
    "--track --wandb-project-name a/b": "--track: Invalid project name 'a/b'",
    "--track --wandb-tags " + "x" * 65: "is 65 characters",
    "--init-from no/such/file.pt": "--init-from no/such/file.pt: there is no checkpoint",
    "3": "3",
}
BAD_MULTI = {
    "--total-num-envs 0": "--total-num-envs 0: must be above 0",
    "--num-envs 8 --total-num-envs 8": "--total-num-envs",
    "--backend mpi": "--backend",
    "--backend nccl --no-cuda": "--backend nccl: needs CUDA, and --no-cuda is set; use gloo",
    "--device-ids 0 --no-cuda": "--device-ids 0: needs CUDA, and --no-cuda is set",
    "--device-ids gpu": "--device-ids",
}
CASES = [(ppo_atari, *case) for case in BAD.items()] + [(ppo_atari_multigpu, *case) for case in BAD_MULTI.items()]


def run_main(script, flags, monkeypatch, cwd):
    """The script's `__main__` in this process: its exit code."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr("sys.argv", ["ppo", *flags.split()])
    with pytest.raises(SystemExit) as leave:
        script.process.run(script.main, script.Args, script.__file__)
    return leave.value.code


@pytest.mark.parametrize("script, flags, says", CASES, ids=[case[1] for case in CASES])
def test_bad_command_lines(script, flags, says, tmp_path, monkeypatch, capsys):
    def no_environment(*_args, **_kwargs):
        raise AssertionError("an environment was made")

    monkeypatch.setattr(script, "make_env", no_environment)
    assert run_main(script, flags, monkeypatch, tmp_path) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: "), err
    assert says in err
    assert os.listdir(tmp_path) == []


def test_a_run_name_that_is_taken(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert run_main(ppo_atari, "--run-name mine", monkeypatch, tmp_path) == 2
    assert "--run-name mine: runs/mine exists" in capsys.readouterr().err


def test_video_without_its_library(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "imageio_ffmpeg", None)
    assert run_main(ppo_atari, "--capture-video", monkeypatch, tmp_path) == 2
    assert "--capture-video" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--gamma 2", "error: --gamma 2.0: must be between 0 and 1"),
        ("--total-num-envs 1", "error: --total-num-envs 1: is fewer than the 2 processes"),
        ("--total-num-envs 5 --batch-size 80", "error: --batch-size 80: needs equal shares; 5 envs, 2 processes"),
        ("--backend nccl --no-cuda", "error: --backend nccl: needs CUDA"),
    ],
)
def test_one_process_speaks_for_the_job(folder, flags, says):
    done = folder.run(command(MULTI, *flags.split(), nproc=2), code=1)  # torchrun's code is 1 whatever its workers'
    assert done.stderr.count("error: ") == 1 and says in done.stderr and "exitcode  : 2" in done.stderr
    assert os.listdir(folder.path) == []


def test_help_is_complete_and_quiet(folder):
    argv = command("ppo_atari_multigpu.py", "--help")
    done = folder.run([argv[0], "-W", "error", *argv[1:]], COLUMNS="200")
    assert done.stderr == ""
    for flag in ("--no-cuda", "--no-anneal-lr", "--local-num-envs", "--target-kl", "--grad-accumulation-steps"):
        assert flag in done.stdout
    assert "--no-torch-deterministic lets it pick the fastest" in done.stdout
    assert os.listdir(folder.path) == []


def test_none_and_numbers(monkeypatch):
    from cleanrl_utils.config import parse

    assert parse(ppo_atari.Args, ["--target-kl", "None"]).target_kl is None
    assert parse(ppo_atari.Args, ["--target-kl", "0.01"]).target_kl == 0.01
    assert parse(ppo_atari.Args, ["--local-num-envs", "3"]).num_envs == 3
    assert parse(ppo_atari.Args, ["--num_envs", "3", "--no-cuda"]) == ppo_atari.Args(num_envs=3, cuda=False)
    assert parse(evaluate.Args, ["--greedy", "runs/first"]) == evaluate.Args("runs/first", greedy=True)


def test_every_flag_is_explained():
    source = Path(ppo_atari_multigpu.__file__).read_text()
    fields = source[source.index("class Args") : source.index("# === Environment")].splitlines()
    for field, following in itertools.pairwise(fields):
        if ": " in field and "=" in field and not field.lstrip().startswith(('"""', "@", "class")):
            assert following.lstrip().startswith('"""'), f"no docstring: {field}"


def test_restarts_need_a_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert run_main(ppo_atari_multigpu, "", monkeypatch, tmp_path) == 2
    rule = "needs --run-name, by which restarted processes find their run"
    assert capsys.readouterr().err == f"error: --max-restarts 2: {rule}\n"
    assert run_main(ppo_atari_multigpu, "--run-name x", monkeypatch, tmp_path) == 2
    assert "error: --max-restarts 2: needs --standalone, or --rdzv-backend=c10d" in capsys.readouterr().err


def test_the_single_script_is_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_main(ppo_atari, "", monkeypatch, tmp_path) == 2
    assert (
        capsys.readouterr().err
        == f"error: {os.path.basename(sys.argv[0])}: is one process, not 2; use ppo_atari_multigpu.py\n"
    )


VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    "variables, says",
    [
        ("RANK=0", "WORLD_SIZE: is not set, but others of torchrun's variables are"),
        ("WORLD_SIZE=2", "RANK: is not set, but"),
        ("RANK=0 WORLD_SIZE=2", "MASTER_ADDR: is not set, but"),
        ("RANK=1", "RANK 1: must be below WORLD_SIZE, 1"),
        ("RANK=2 WORLD_SIZE=2", "RANK 2: must be below WORLD_SIZE, 2"),
        ("RANK=0 WORLD_SIZE=0", "RANK 0: must be below WORLD_SIZE, 0"),
        ("RANK=first WORLD_SIZE=2", "RANK 'first': must be a number, as torchrun sets it"),
        ("RANK=-1 WORLD_SIZE=2", "RANK '-1': must be a number"),
        ("LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK 2: must be below LOCAL_WORLD_SIZE"),
        ("LOCAL_WORLD_SIZE=0", "LOCAL_RANK 0: must be below LOCAL_WORLD_SIZE"),
    ],
)
def test_variables_of_torchrun_that_do_not_fit(variables, says, tmp_path, monkeypatch, capsys):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert run_main(ppo_atari_multigpu, "", monkeypatch, tmp_path) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {says}") and err.count("\n") == 1, err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("local_rank, lines", [("0", 1), ("1", 0)])
def test_an_error_of_another_machine_is_said_there(local_rank, lines, tmp_path, monkeypatch, capsys):
    """Before the processes have met: process 0 can't know of it."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(process, "met", False)  # those of a test before
    for name, value in zip(VARIABLES, ("2", local_rank, "4", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert run_main(ppo_atari_multigpu, "--gamma 2", monkeypatch, tmp_path) == 2
    assert capsys.readouterr().err.count("error: --gamma 2.0: must be between 0 and 1") == lines


def test_a_checkpoint_folder_that_can_not_be_made(tmp_path, monkeypatch, capsys):
    """It is named, and nothing stays that the next try would call a run."""
    (tmp_path / "file").write_text("")
    assert run_main(ppo_atari, "--run-name x --checkpoint-dir file/there", monkeypatch, tmp_path) == 2
    where = f"--checkpoint-dir {tmp_path}/file/there/x"
    assert capsys.readouterr().err == f"error: can't make {where}: Not a directory\n"
    assert os.listdir(tmp_path / "runs") == []


def test_a_run_name_that_is_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    assert run_main(ppo_atari, "--run-name file --resume", monkeypatch, tmp_path) == 2
    assert capsys.readouterr().err.startswith("error: --run-name file: NotADirectoryError")
    assert run_main(ppo_atari, f"--run-name {'x' * 300}", monkeypatch, tmp_path) == 2
    assert "error: --run-name xxx" in capsys.readouterr().err
    assert run_main(ppo_atari, "--checkpoint-dir runs/file", monkeypatch, tmp_path) == 2
    assert capsys.readouterr().err == f"error: --checkpoint-dir: {tmp_path}/runs/file is not a folder\n"


@pytest.mark.parametrize("script", [ppo_atari, ppo_atari_multigpu])
def test_no_flags_at_all(script):
    """`make train` and `python ppo_atari.py` give none."""
    from cleanrl_utils.config import parse

    assert parse(script.Args, []) == script.Args()
