"""Environments in worker processes against the same environments in this one."""

import os
import signal
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from cleanrl_utils.atari import AtariGame
from cleanrl_utils.config import Fault
from cleanrl_utils.pool import PoolVectorEnv

SAME_STEP = AutoresetMode.SAME_STEP


def same(a, b):
    """Equal values, types and keys, through dictionaries and arrays of objects."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray) and a.dtype == object:
        return b.dtype == object and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and np.array_equal(a, b)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_all_that_a_step_returns_equals_syncs(workers):
    """Short games, so that blocks with, without, and with other infos meet."""

    def make(seed):
        return lambda: AtariGame("BreakoutNoFrameskip-v4", seed, max_episode_frames=90 + 7 * seed)

    thunks = [make(seed) for seed in range(4)]
    sync, pool = SyncVectorEnv(thunks, autoreset_mode=SAME_STEP), PoolVectorEnv(thunks, workers)
    assert len(pool._pipes) == workers
    assert (pool.num_envs, pool.single_action_space) == (sync.num_envs, sync.single_action_space)
    assert (pool.observation_space, pool.action_space) == (sync.observation_space, sync.action_space)
    assert pool.metadata["autoreset_mode"] == SAME_STEP
    keys = set()
    for seed in (None, 5, [3, 2, 1, 0]):
        for a, b in zip(sync.reset(seed=seed), pool.reset(seed=seed), strict=True):
            assert same(a, b)
        rng = np.random.default_rng(0)
        for _ in range(60):
            actions = rng.integers(4, size=4)
            for a, b in zip(sync.step(actions), pool.step(actions), strict=True):
                assert same(a, b)
                keys |= a.keys() if isinstance(a, dict) else set()
    assert {"final_obs", "final_info", "games", "_games"} <= keys
    pool.set_attr("state", sync.get_attr("state"))
    another = PoolVectorEnv(thunks, workers)  # its workers have copies of the first one's pipes
    pool.set_attr("clip_reward", False)
    assert pool.get_attr("clip_reward") == (False,) * 4 and len(pool.get_attr("state")) == 4
    sync.close()
    pool.close()
    another.close()
    assert all(worker.exitcode == 0 for worker in pool._workers)


class Failing(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (2,), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.uint8), {}

    def step(self, action):
        assert action != 1, "one is not played here"
        return np.ones(2, np.uint8), 1.0, False, False, {}


def test_errors_of_workers_are_raised_and_the_next_step_goes_on():
    envs = PoolVectorEnv([Failing, Failing, Failing], 2)
    envs.reset()
    with pytest.raises(RuntimeError, match=r"AssertionError: one is not played here[\s\S]*in step"):
        envs.step(np.array([1, 0, 1]))
    with pytest.raises(AttributeError, match="state"):
        envs.get_attr("state")
    obs, rewards, *_ = envs.step(np.array([0, 0, 0]))
    assert (obs == 1).all() and (rewards == 1).all()
    envs.close()


class Large(Failing):
    large = bytes(10_000_000)


def test_a_worker_whose_answer_nobody_reads_is_ended():
    """As when the worker before it was killed while a checkpoint was being gathered."""
    envs = PoolVectorEnv([Large, Large], 2)
    envs._pipes[1].send(("call", {"name": "large", "args": (), "kwargs": {}}))
    envs.close(patience=0.5)
    envs._workers[1].join(10)
    assert envs._workers[1].exitcode == -9


def test_an_interrupted_start_leaves_no_workers(folder):
    """They don't listen to the SIGTERM by which multiprocessing ends those that are left, and would be waited for."""
    (folder.path / "interrupted.py").write_text(
        "import multiprocessing.context as context, sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_pool import Failing, PoolVectorEnv\n"
        "start, started = context.ForkProcess.start, []\n"
        "def watched(self):\n"
        "    start(self); started.append(self)\n"
        "    if len(started) == 2:\n"
        "        started[0].join(0.5)  # so that its signals are set\n"
        "        raise KeyboardInterrupt\n"
        "context.ForkProcess.start = watched\n"
        "PoolVectorEnv([Failing] * 3, 3)\n"
    )
    argv = [sys.executable, "interrupted.py", str(ROOT), str(ROOT / "tests")]
    assert "KeyboardInterrupt" in folder.run(argv, code=-2, timeout=120).stderr


def test_a_killed_worker_ends_the_step_with_its_exit_code():
    envs = PoolVectorEnv([Failing, Failing], 2)
    envs.reset()
    os.kill(envs._workers[1].pid, signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(Fault, match="exit code -9"):
        envs.step(np.array([0, 0]))
    envs.close()
