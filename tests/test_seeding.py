"""Seeds of environments and shares of processes."""

import numpy as np
import pytest

from cleanrl_utils.seeding import env_seeds, seed_everything, share


def test_shares_are_contiguous_and_larger_first():
    assert [share(16, rank, 3) for rank in range(3)] == [(0, 6), (6, 5), (11, 5)]
    for total in (1, 5, 16, 61):
        for world_size in range(1, total + 1):
            parts = [share(total, rank, world_size) for rank in range(world_size)]
            counts = [count for _, count in parts]
            assert [first for first, _ in parts] == [sum(counts[:i]) for i in range(world_size)]
            assert sum(counts) == total and max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_jobs_seeds_do_not_depend_on_the_processes(world_size):
    parts = [env_seeds(7, *share(20, rank, world_size)) for rank in range(world_size)]
    assert [seed for part in parts for seed in part] == env_seeds(7, 0, 20)


def test_seeds_are_distinct_across_a_job_and_across_neighbouring_experiments():
    seeds = [seed for experiment in range(20) for seed in env_seeds(experiment, 0, 64)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 and type(seed) is int for seed in seeds)


def test_a_collision_takes_the_next_word(monkeypatch):
    """Environment 3 draws environment 1's seed first: distinct by construction, not by luck."""
    words = {0: [10], 1: [20], 2: [30], 3: [20, 40]}

    class Sequence:
        def __init__(self, entropy):
            self.words = words[entropy[1]]

        def generate_state(self, n):
            return np.array(self.words[:n], np.uint32)

    monkeypatch.setattr(np.random, "SeedSequence", Sequence)
    assert env_seeds(1, 0, 4) == [5, 10, 15, 20]
    assert env_seeds(1, 3, 1) == [20]


def test_the_jobs_generator_follows_from_the_seed_alone():
    import torch

    def draw(seed):
        return torch.rand(4, generator=seed_everything(seed, True))

    assert not torch.equal(draw(2**64 + 3), draw(3)), "of any size"
    assert torch.equal(draw(3), draw(3)) and not torch.equal(draw(3), draw(4))
    draw(3)
    weights = torch.rand(4)
    draw(3)
    assert torch.equal(weights, torch.rand(4)), "the global generator is seeded too: initial weights"
