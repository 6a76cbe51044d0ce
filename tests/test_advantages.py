"""Advantages by hand, and the values that time limits bootstrap from."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SMALL

import ppo_atari
import ppo_atari_multigpu

GAMMA, LAMBDA = 0.99, 0.95


def gae(script, rewards, values, dones, next_value, next_done):
    def column(x):
        return torch.tensor(x, dtype=torch.float32).view(len(x), -1)

    advantages, returns = script.compute_gae(
        column(rewards), column(values), column(dones), column(next_value), column(next_done), GAMMA, LAMBDA
    )
    assert torch.allclose(returns, advantages + column(values))
    return advantages


@pytest.fixture(params=[ppo_atari, ppo_atari_multigpu])
def script(request):
    return request.param


def test_an_episode_that_ends_in_the_middle(script):
    advantages = gae(script, [1, 1, 1], [0.5, 0.5, 0.5], [0, 0, 1], [2], [0])
    assert torch.allclose(advantages.flatten(), torch.tensor([1.46525, 0.5, 2.48]))


def test_an_episode_that_ends_with_the_rollout(script):
    advantages = gae(script, [1, 1], [0.5, 0.25], [0, 0], [100], [1])
    last = 1 - 0.25
    assert torch.allclose(advantages.flatten(), torch.tensor([1 + 0.99 * 0.25 - 0.5 + 0.99 * 0.95 * last, last]))


def test_a_done_before_the_first_step_changes_nothing(script):
    assert torch.equal(gae(script, [1], [0.5], [1], [2], [0]), gae(script, [1], [0.5], [0], [2], [0]))


def test_ending_does_not_pay(script):
    """A done stored one step late would pay V(reset) = 100 for ending."""
    advantages = gae(script, [0, -1, 0], [3, 3, 100], [0, 0, 1], [100], [0])
    assert torch.allclose(advantages[1], torch.tensor([-4.0]))


def test_environments_do_not_mix(script):
    one = gae(script, [1, 1, 1], [0.5, 0.5, 0.5], [0, 0, 1], [2], [0])
    other = gae(script, [0, 2, -1], [1, 0, 3], [0, 1, 0], [-1], [1])
    both = gae(
        script, *np.dstack([[[1, 1, 1], [0.5] * 3, [0, 0, 1]], [[0, 2, -1], [1, 0, 3], [0, 1, 0]]]), [[2, -1]], [[0, 1]]
    )
    assert torch.allclose(both, torch.cat([one, other], 1))


class ThreeSteps(gym.Env):
    """Ends at its third step, by death, by a time limit, or by both at once. Every reward is 1.

    A frame's pixels name it: 10 the last of an episode, 100 the first, 1 all others.
    """

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def __init__(self, ending):
        self.ending = ending

    def frame(self, value):
        return np.full((4, 84, 84), value, np.uint8)

    def reset(self, seed=None, options=None):
        self.steps = 0
        return self.frame(100), {}

    def step(self, action):
        self.steps += 1
        last = self.steps == 3
        terminated, truncated = last and self.ending != "truncated", last and self.ending != "terminated"
        return self.frame(10 if last else 1), 1.0, terminated, truncated, {}


@pytest.mark.parametrize("ending, bonus", [("terminated", 0.0), ("truncated", GAMMA * 10), ("both", 0.0)])
def test_a_time_limit_bootstraps_from_the_final_observation(script, ending, bonus, tmp_path, monkeypatch):
    """The script's own rollout, with a critic that reads the frame's number: V(final) = 10, V(reset) = 100."""
    seen = {}

    class Stub(script.Agent):
        def get_value(self, x):
            return x[:, 0, 0, :1].float()

        def get_action_and_value(self, x, action=None, noise=None):
            action, logprob, entropy, value = super().get_action_and_value(x, action, noise)
            return action, logprob, entropy, value if action is None else value * 0 + self.get_value(x)

    def compute_gae(rewards, values, dones, *rest):
        seen.setdefault("rollout", (rewards.clone(), values.clone(), dones.clone()))
        return original(rewards, values, dones, *rest)

    original = script.compute_gae
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "Agent", Stub)
    monkeypatch.setattr(script, "make_env", lambda *a, **k: lambda: ThreeSteps(ending))
    monkeypatch.setattr(script, "compute_gae", compute_gae)
    monkeypatch.setattr("sys.argv", ["x", "--num-envs", "2", "--total-timesteps", "32", *SMALL])
    with pytest.raises(SystemExit) as leave:
        script.process.run(script.main, script.Args, script.__file__)
    assert leave.value.code == 0
    rewards, values, dones = seen["rollout"]
    expected = torch.tensor([1, 1, 1 + bonus] * 6)[:16]
    assert torch.allclose(rewards, expected[:, None].expand(16, 2))
    assert torch.equal(dones[:, 0], torch.tensor(([0.0] + [0.0, 0.0, 1.0] * 6)[:16]))
    assert torch.equal(values[:, 0], torch.tensor(([100.0, 1.0, 1.0] * 6)[:16])), "no autoreset step in the batch"
