"""The network: sampling, memory and gradient options."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ablation import changed

import ppo_atari

ENVS = SimpleNamespace(single_action_space=SimpleNamespace(n=4))


def make_agent(**kwargs):
    torch.manual_seed(0)
    return ppo_atari.Agent(ENVS, **kwargs).to(memory_format=torch.channels_last)


def frames(n):
    return torch.randint(0, 256, (n, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_shapes_and_values():
    agent, x = make_agent(), frames(5)
    action, logprob, entropy, value = agent.get_action_and_value(x)
    assert action.shape == logprob.shape == entropy.shape == (5,) and value.shape == (5, 1)
    assert torch.equal(value, agent.get_value(x))
    expected = torch.distributions.Categorical(logits=agent.actor(agent.hidden(x)))
    assert torch.allclose(logprob, expected.log_prob(action)) and torch.allclose(entropy, expected.entropy())
    again, same, _, _ = agent.get_action_and_value(x, action)
    assert torch.equal(again, action) and torch.equal(same, logprob)


def test_gumbel_noise_samples_the_policy():
    """Frequencies of 20,000 draws within 4 standard errors of the probabilities."""
    agent, x, n = make_agent(), frames(1), 20_000
    agent.actor.bias.data = torch.tensor([1.0, 0.0, -1.0, 0.5])
    noise = ppo_atari.gumbel((n, 4), torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = agent.actor(agent.hidden(x))
        probs = logits.softmax(1)[0].numpy()
        counts = np.bincount((logits + noise).argmax(1).numpy(), minlength=4)
        action, *_ = agent.get_action_and_value(x, noise=noise[:1])
    assert action == (logits + noise[:1]).argmax(1)
    assert (np.abs(counts / n - probs) < 4 * np.sqrt(probs * (1 - probs) / n)).all()


def test_observations_are_not_changed_and_layout_does_not_matter():
    agent, x = make_agent(), frames(6)
    kept = x.clone()
    channels_last = x.movedim(1, -1).contiguous().movedim(-1, 1)
    with torch.no_grad():
        assert torch.equal(agent.get_value(x), agent.get_value(channels_last))
        assert torch.allclose(agent.get_value(x.float()), agent.get_value(x))
        plain = agent.critic(agent.network(x / 255.0))  # CleanRL's network on CleanRL's input
    assert torch.equal(x, kept) and torch.allclose(plain, agent.get_value(x), atol=1e-5)


def gradients(agent, x):
    agent.zero_grad()
    _, logprob, entropy, value = agent.get_action_and_value(x, torch.zeros(len(x), dtype=torch.long))
    (logprob.mean() + entropy.mean() + value.square().mean()).backward()
    return [p.grad.clone() for p in agent.parameters()]


def peak_memory(work):
    """Bytes that `work` allocates at most at one time, from torch's own allocation records."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def test_activation_checkpointing_saves_memory_at_equal_gradients():
    x, plain, saving = frames(256), make_agent(), make_agent(activation_checkpointing=True)
    for a, b in zip(gradients(plain, x), gradients(saving, x), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    full, less = peak_memory(lambda: gradients(plain, x)), peak_memory(lambda: gradients(saving, x))
    weights = 3 * 4 * sum(p.numel() for p in plain.parameters())  # gradients and their copies are not activations
    print(f"peak: {full / 1e6:.0f} MB, with activation checkpointing {less / 1e6:.0f} MB")
    assert full > 256 * 4 * 84 * 84 * 4, "the measurement must see the activations"
    assert less - weights < 0.6 * (full - weights)


def test_gradients_stay_views_of_one_buffer():
    """What the scripts build on: backward adds to the views, also with channels-last weights."""
    agent = make_agent()
    params = list(agent.parameters())
    flat = torch.zeros(sum(p.numel() for p in params))
    for p, g in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = g.as_strided(p.shape, p.stride())
    where = [p.grad.data_ptr() for p in params]
    agent.get_value(frames(4)).sum().backward()
    assert [p.grad.data_ptr() for p in params] == where
    used = [p for name, p in agent.named_parameters() if not name.startswith("actor")]
    total = sum(p.grad.square().sum() for p in used)
    assert total > 0 and torch.allclose(flat.square().sum(), total)


@pytest.mark.parametrize(
    "warmup, anneal, expected", [(0, True, [4, 3, 2, 1]), (2, False, [2, 4, 4, 4]), (2, True, [2, 3, 2, 1])]
)
def test_learning_rate(warmup, anneal, expected):
    args = ppo_atari.Args(learning_rate=4.0, lr_warmup_iterations=warmup, anneal_lr=anneal)
    assert [ppo_atari.learning_rate(args, i, 4) for i in range(1, 5)] == expected


def test_bf16_keeps_fp32_weights_and_outputs_and_its_gradients_are_near():
    """bfloat16 has 8 bits of precision: the gradients agree to a few parts in a hundred, in direction to 1e-3."""
    x, full, half = frames(64), make_agent(), make_agent(precision="bf16")
    assert all(p.dtype == torch.float32 for p in half.parameters())
    assert {y.dtype for y in half.get_action_and_value(x)[1:]} == {torch.float32}
    a, b = (torch.cat([g.flatten() for g in gradients(agent, x)]) for agent in (full, half))
    assert b.dtype == torch.float32 and not torch.equal(a, b)
    assert torch.cosine_similarity(a, b, dim=0) > 0.999 and abs(a.norm() / b.norm() - 1) < 0.02


def test_the_ablation_that_rounds_fp32_has_the_numbers_of_bf16(tmp_path, monkeypatch):
    (tmp_path / "rounded.py").write_text(changed(["rounded-fp32"]))
    monkeypatch.syspath_prepend(tmp_path)
    rounded = importlib.import_module("rounded")
    found = []
    for module, precision in ((ppo_atari, "bf16"), (rounded, "bf16"), (ppo_atari, "fp32"), (rounded, "fp32")):
        torch.manual_seed(0)
        agent = module.Agent(ENVS, precision=precision).to(memory_format=torch.channels_last)
        found.append(torch.cat([g.flatten() for g in gradients(agent, frames(64))]))
    half, rounded_half, full, same = found
    assert torch.equal(full, same)
    assert (rounded_half - half).norm() < 0.5 * (full - half).norm()
