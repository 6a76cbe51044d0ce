"""It learns: a copied script solves a small game from pictures, alone and on two processes, and broken copies do not.

The game is made to be learned in a few thousand steps; the flags have the larger steps that this needs.
"""

import shutil

import numpy as np
import pytest
from ablation import changed
from conftest import ROOT, command, final, scalars

BEST, STEPS, LAST = 4, 4096, 512  # the best score; the run's steps, and the last of them, whose games count
DIFFERENT = 60  # of the 81 possible games; hardly 45 where the 8 environments all play the same ones
FLAGS = [
    *("--env-id", "Catch-v0", "--total-timesteps", STEPS, "--total-num-envs", 8, "--num-steps", 16),
    *("--num-minibatches", 4, "--update-epochs", 2, "--learning-rate", 2e-3, "--gamma", 0.9, "--ent-coef", 0.001),
    *("--num-threads", 1, "--no-cuda"),
]


def change(file, old, new):
    source = file.read_text()
    assert source.count(old) == 1, f"the line of this change has changed: {old}"
    file.write_text(source.replace(old, new))


def train(folder, seed, nproc=None, fault=None, code=0):
    """Train with a copied script: (mean score of the last games, number of different games that were played)."""
    (folder.path / "mine.py").write_text(changed(["small-game"]))
    shutil.copy(ROOT / "tests" / "catch.py", folder.path)
    if fault:
        file, *edit = fault
        if file == "atari.py":  # the folder's own package is imported first
            shutil.copytree(ROOT / "cleanrl_utils", folder.path / "cleanrl_utils")
            file = "cleanrl_utils/atari.py"
        change(folder.path / file, *edit)
    done = folder.run(command(str(folder.path / "mine.py"), "--seed", seed, *FLAGS, nproc=nproc), code=code)
    if code:
        return done.stderr
    assert final(done.stdout)[0] == STEPS
    (events,) = folder.event_folders()
    games = [value for step, value in scalars(events)["charts/episodic_return"] if step > STEPS - LAST]
    assert len(games) > 30
    different = len(set((folder.path / "games.txt").read_text().splitlines()))
    print(
        f"seed {seed}, {nproc or 1} process(es), {fault}: {np.mean(games):.2f} of {BEST}, {different} different games"
    )
    return np.mean(games), different


@pytest.mark.parametrize(
    "seed, nproc",
    [(1, None), (2, 2), *(pytest.param(*run, marks=pytest.mark.slow) for run in ((1, 2), (2, None), (3, 2)))],
)
def test_it_learns(folder, seed, nproc):
    score, different = train(folder, seed, nproc)
    assert score >= 0.9 * BEST
    assert different >= DIFFERENT


FAULTS = {
    "advantages negated": (
        "mine.py",
        "mb_advantages = b_advantages[mb_inds]",
        "mb_advantages = -b_advantages[mb_inds]",
    ),
    "sign of the policy loss": ("mine.py", "pg_loss = -torch.min(", "pg_loss = torch.min("),
    "ratio upside down": (
        "mine.py",
        "logratio = newlogprob - b_logprobs[mb_inds]",
        "logratio = b_logprobs[mb_inds] - newlogprob",
    ),
    "sign of the value in the advantage": ("mine.py", "values_after - values\n", "values_after + values\n"),
    "dones ignored": (
        "mine.py",
        "(1.0 - torch.cat([dones[1:], next_done.view(1, -1)]))",
        "torch.ones_like(values)",
    ),
    "seeds that are equal": ("mine.py", "seeding.env_seeds(args.seed, first_env, num_envs)", "[args.seed] * num_envs"),
    "seeds that come back with every game": (
        "atari.py",
        "        if seed is None:\n            self.env.ale.reset_game()",
        "        if seed is None:\n            self.env.reset(seed=1)",
    ),
    "pictures that are blank": (
        "atari.py",
        "return cv2.resize(self._frames[0]",
        "return cv2.resize(self._frames[0] * 0",
    ),
    "pictures that stand still": ("atari.py", "        self._stack[-1] = self._screen()\n", ""),
}


@pytest.mark.parametrize(
    "fault", [f if f == "advantages negated" else pytest.param(f, marks=pytest.mark.slow) for f in FAULTS]
)
def test_broken_copies_do_not_learn(folder, fault):
    score, different = train(folder, 1, fault=FAULTS[fault])
    assert different < DIFFERENT if "seeds" in fault else score < 0.9 * BEST


def test_gradients_that_are_not_reduced_end_the_job(folder):
    fault = "mine.py", "                all_reduce(flat_grad)", "                pass"
    assert "the processes' weights have parted" in train(folder, 1, nproc=2, fault=fault, code=1)
