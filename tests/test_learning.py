"""It learns: a copied script solves a small game from pictures, alone and on two processes, and broken copies do not.

The game is made to be learned in a few thousand steps; the flags have the larger steps that this needs.
"""

import shutil

import numpy as np
import pytest
from conftest import MULTI, ROOT, command, final, scalars

BEST, STEPS, LAST = 4, 3072, 512  # the best score; the run's steps, and the last of them, whose games count
FLAGS = [
    *("--env-id", "Catch-v0", "--total-timesteps", STEPS, "--total-num-envs", 8, "--num-steps", 16),
    *("--num-minibatches", 4, "--update-epochs", 2, "--learning-rate", 2e-3, "--gamma", 0.9, "--ent-coef", 0.001),
    *("--num-threads", 1, "--no-cuda"),
]
COPY = [  # what a user changes for a game that is not ale-py's
    ("from cleanrl_utils import process", "import catch  # registers Catch-v0\nfrom cleanrl_utils import process"),
    ("    check_game(args)\n", ""),
    ("noop_max=30", "noop_max=0"),  # its games are short
]


def train(folder, seed, nproc=None, fault=None, code=0):
    """Mean score of the last games of a copied script."""
    source = (ROOT / MULTI).read_text()
    for old, new in [*COPY, *([fault] if fault else [])]:
        assert source.count(old) == 1, f"the line of this change has changed: {old}"
        source = source.replace(old, new)
    (folder.path / "mine.py").write_text(source)
    shutil.copy(ROOT / "tests" / "catch.py", folder.path)
    done = folder.run(command(str(folder.path / "mine.py"), "--seed", seed, *FLAGS, nproc=nproc), code=code)
    if code:
        return done.stderr
    assert final(done.stdout)[0] == STEPS
    (events,) = folder.event_folders()
    games = [value for step, value in scalars(events)["charts/episodic_return"] if step > STEPS - LAST]
    assert len(games) > 30
    print(f"seed {seed}, {nproc or 1} process(es), {fault}: {np.mean(games):.2f} of {BEST} in {len(games)} games")
    return np.mean(games)


@pytest.mark.parametrize(
    "seed, nproc",
    [
        (1, None),
        (2, 2),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(2, None, marks=pytest.mark.slow),
    ],
)
def test_it_learns(folder, seed, nproc):
    assert train(folder, seed, nproc) >= 0.9 * BEST
