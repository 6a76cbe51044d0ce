"""Three levels of seeds: experiment -> process -> environment.

The experiment has one seed (`--seed`). A process has none of its own: it owns a contiguous range of the job's
environments (`share`), and the numbers of those environments choose their seeds. So no random stream depends on
how many processes there are, and `seed + rank` can't give two processes, or two experiments, the same games.
"""

import random

import numpy as np
import torch


def share(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Process `rank`'s contiguous part of `total` environments, larger parts first: (number of the first, count).

    >>> [share(16, rank, 3) for rank in range(3)]
    [(0, 6), (6, 5), (11, 5)]
    """
    size, larger = divmod(total, world_size)
    return rank * size + min(rank, larger), size + (rank < larger)


def env_seeds(seed: int, first: int, count: int) -> list[int]:
    """The seeds of environments `first`..`first + count - 1` of the experiment `seed`: distinct integers below 2**31.

    Environment e takes the first word of `SeedSequence((seed, e))` that no environment before it has taken. Hence
    the list of a job is the same however it is cut into ranges.
    """
    taken: dict[int, None] = {}  # ordered, and asks in constant time
    for e in range(first + count):
        words = 1
        while (word := int(np.random.SeedSequence((seed, e)).generate_state(words)[-1]) >> 1) in taken:
            words += 1
        taken[word] = None
    return list(taken)[first:]


def seed_everything(seed: int, deterministic: bool) -> torch.Generator:
    """Seed Python, numpy and torch for the whole job, alike in all processes.

    Returns the CPU generator of the algorithm's own draws, of which each process uses its own columns.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    return torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1))
