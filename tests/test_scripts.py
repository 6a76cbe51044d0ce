"""The scripts as text: their diff, their size, and a copy that somebody changes."""

import difflib
import shutil

from conftest import MULTI, ROOT, SINGLE, command, final


def lines(script):
    return (ROOT / script).read_text().splitlines()


def test_the_diff_is_a_lesson():
    """Every line that data parallelism adds is marked, and there are few of them."""
    diff = [line for line in difflib.ndiff(lines(SINGLE), lines(MULTI)) if line[:2] in ("- ", "+ ")]
    removed = [line for line in diff if line[0] == "-"]
    added = [line for line in diff if line[0] == "+"]
    print(*diff, f"-{len(removed)} +{len(added)}", sep="\n")
    assert len(removed) <= 12 and len(added) <= 80
    code = lines(MULTI)[lines(MULTI).index("from dataclasses import dataclass") :]
    unmarked = [
        line for line in added if line[2:] in code and "[ddp]" not in line and '"""' not in line and line[2:].strip()
    ]
    assert unmarked == []


def test_the_scripts_stay_short():
    assert len(lines(SINGLE)) < 400 and len(lines(MULTI)) <= 470


def test_what_training_imports_stays_small_and_imports_no_tools():
    modules = ("atari", "checkpoint", "config", "logger", "pool", "process", "seeding", "shared_memory")
    sources = [(ROOT / "cleanrl_utils" / f"{m}.py").read_text() for m in modules]
    assert sum(source.count("\n") for source in sources) < 1800  # half of it for checkpoints and their logs
    imported = {
        line.split()[1]
        for source in [*sources, *(("\n".join(lines(s))) for s in (SINGLE, MULTI))]
        for line in source.splitlines()
        if line.startswith(("from cleanrl_utils", "import cleanrl_utils"))
    }
    assert imported <= {"cleanrl_utils"} | {f"cleanrl_utils.{m}" for m in modules}


def test_a_copied_script_with_another_network_trains(folder):
    """A copy in another folder, its Agent changed, alone and on two processes."""
    shutil.copy(ROOT / MULTI, folder.path / "mine.py")
    source = (folder.path / "mine.py").read_text()
    for old, new in (
        ("nn.Conv2d(4, 32, 8, stride=4)", "nn.Conv2d(4, 16, 8, stride=4)"),
        ("nn.Conv2d(32, 64, 4, stride=2)", "nn.Conv2d(16, 32, 4, stride=2)"),
        ("nn.Conv2d(64, 64, 3, stride=1)", "nn.Conv2d(32, 64, 3, stride=1)"),
        ("nn.ReLU()", "nn.Tanh()"),
    ):
        assert old in source
        source = source.replace(old, new)
    (folder.path / "mine.py").write_text(source)
    flags = [
        "--total-num-envs",
        2,
        "--num-steps",
        16,
        "--total-timesteps",
        96,
        "--env-id",
        "ALE/Pong-v5",
        "--num-threads",
        1,
    ]
    alone, two = (folder.run(command(str(folder.path / "mine.py"), *flags, nproc=nproc)) for nproc in (None, 2))
    assert final(alone.stdout)[0] == final(two.stdout)[0] == 96
    assert abs(final(alone.stdout)[1] - final(two.stdout)[1]) < 1e-2
    assert len(folder.event_folders()) == 2 and all("ALE-Pong-v5__mine__1__" in f for f in folder.event_folders())
