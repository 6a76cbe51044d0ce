"""Published scores to compare with: humans, random play, and CleanRL's PPO. Imports nothing, so any tool can use it."""

import re

# The 57 games of the standard set: raw scores of uniformly random play and of a professional human tester, both after
# 1..30 no-ops and with at most 30 minutes a game. Wang et al. 2016 (https://arxiv.org/abs/1511.06581), appendix, table
# of raw scores with 30 no-op starts; the same columns are in Badia et al. 2020 (https://arxiv.org/abs/2003.13350).
RANDOM_AND_HUMAN: dict[str, tuple[float, float]] = {
    "Alien": (227.8, 7127.7),
    "Amidar": (5.8, 1719.5),
    "Assault": (222.4, 742.0),
    "Asterix": (210.0, 8503.3),
    "Asteroids": (719.1, 47388.7),
    "Atlantis": (12850.0, 29028.1),
    "BankHeist": (14.2, 753.1),
    "BattleZone": (2360.0, 37187.5),
    "BeamRider": (363.9, 16926.5),
    "Berzerk": (123.7, 2630.4),
    "Bowling": (23.1, 160.7),
    "Boxing": (0.1, 12.1),
    "Breakout": (1.7, 30.5),
    "Centipede": (2090.9, 12017.0),
    "ChopperCommand": (811.0, 7387.8),
    "CrazyClimber": (10780.5, 35829.4),
    "Defender": (2874.5, 18688.9),
    "DemonAttack": (152.1, 1971.0),
    "DoubleDunk": (-18.6, -16.4),
    "Enduro": (0.0, 860.5),
    "FishingDerby": (-91.7, -38.7),
    "Freeway": (0.0, 29.6),
    "Frostbite": (65.2, 4334.7),
    "Gopher": (257.6, 2412.5),
    "Gravitar": (173.0, 3351.4),
    "Hero": (1027.0, 30826.4),
    "IceHockey": (-11.2, 0.9),
    "Jamesbond": (29.0, 302.8),
    "Kangaroo": (52.0, 3035.0),
    "Krull": (1598.0, 2665.5),
    "KungFuMaster": (258.5, 22736.3),
    "MontezumaRevenge": (0.0, 4753.3),
    "MsPacman": (307.3, 6951.6),
    "NameThisGame": (2292.3, 8049.0),
    "Phoenix": (761.4, 7242.6),
    "Pitfall": (-229.4, 6463.7),
    "Pong": (-20.7, 14.6),
    "PrivateEye": (24.9, 69571.3),
    "Qbert": (163.9, 13455.0),
    "Riverraid": (1338.5, 17118.0),
    "RoadRunner": (11.5, 7845.0),
    "Robotank": (2.2, 11.9),
    "Seaquest": (68.4, 42054.7),
    "Skiing": (-17098.1, -4336.9),
    "Solaris": (1236.3, 12326.7),
    "SpaceInvaders": (148.0, 1668.7),
    "StarGunner": (664.0, 10250.0),
    "Surround": (-10.0, 6.5),
    "Tennis": (-23.8, -8.3),
    "TimePilot": (3568.0, 5229.2),
    "Tutankham": (11.4, 167.6),
    "UpNDown": (533.4, 11693.2),
    "Venture": (0.0, 1187.5),
    "VideoPinball": (16256.9, 17667.9),
    "WizardOfWor": (563.5, 4756.5),
    "YarsRevenge": (3092.9, 54576.9),
    "Zaxxon": (32.5, 9173.3),
}

# CleanRL's benchmark tables (https://docs.cleanrl.dev/rl-algorithms/ppo/): mean and standard deviation of 3 seeds after
# 10 million agent steps. Returns are averages over training games, not evaluations.
CLEANRL_PPO: dict[str, dict[str, tuple[float, float]]] = {
    "ppo_atari": {"Pong": (20.36, 0.20), "BeamRider": (1915.93, 484.58), "Breakout": (414.66, 28.09)},
    "ppo_atari_multigpu": {"Pong": (20.34, 0.43), "BeamRider": (2414.65, 643.74), "Breakout": (414.94, 20.60)},
    "ppo_atari_envpool": {"Pong": (20.45, 0.09), "BeamRider": (2501.85, 210.52), "Breakout": (211.24, 151.84)},
}


def game_name(env_id: str) -> str:
    """The game of an environment id, also as run names write it.

    >>> [game_name(env_id) for env_id in ("PongNoFrameskip-v4", "ALE/Pong-v5", "ALE-Pong-v5", "PongDeterministic-v4")]
    ['Pong', 'Pong', 'Pong', 'Pong']
    """
    return re.sub(r"^ALE[/-]|(NoFrameskip|Deterministic)?-v\d+$", "", env_id)


def human_normalized(env_id: str, score: float) -> float | None:
    """0 for the score of random play, 1 for the human's (Mnih et al. 2015); None where no human score is published.

    >>> human_normalized("PongNoFrameskip-v4", 14.6), human_normalized("ALE/Breakout-v5", 1.7)
    (1.0, 0.0)
    """
    game = game_name(env_id)
    if game not in RANDOM_AND_HUMAN:
        return None
    random, human = RANDOM_AND_HUMAN[game]
    return (score - random) / (human - random)
