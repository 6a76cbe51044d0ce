"""The fused environment against gymnasium's wrappers, and against an independent count of the emulator's games."""

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

import ppo_atari
from cleanrl_utils.atari import AtariGame, finished_games, make_vector

PLAIN = {"episodic_life": False, "fire_reset": False, "clip_reward": False}
GAMES = ["Breakout", "Pong", "BeamRider", "Seaquest", "SpaceInvaders", "Qbert", "Freeway", "MsPacman"]


def reference(env_id, **kwargs):
    env = gym.make(env_id, frameskip=1, **kwargs)
    env = AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84, terminal_on_life_loss=False)
    return FrameStackObservation(env, 4)


@pytest.mark.parametrize("game", GAMES)
def test_pixels_rewards_and_ends_equal_gymnasiums(game):
    """Several games of random actions; the one allowed difference is the frame in which a game ends inside the skip."""
    env_id = f"{game}NoFrameskip-v4"
    # a time limit, so that games end that random actions would not end
    theirs, ours = (
        reference(env_id, max_num_frames_per_episode=1601),
        AtariGame(env_id, max_episode_frames=1601, **PLAIN),
    )
    rng = np.random.default_rng(0)
    compared = ends = 0
    for seed in (0, 7):
        expected, _ = theirs.reset(seed=seed)
        observed, _ = ours.reset(seed=seed)
        assert observed.shape == (4, 84, 84) and observed.dtype == np.uint8
        assert (observed == observed[0]).all(), "after a reset all four frames are the reset frame"
        for _ in range(500):
            assert np.array_equal(expected, observed)
            compared += 1
            action = int(rng.integers(ours.action_space.n))
            expected, reward, terminated, truncated, _ = theirs.step(action)
            observed, *ours_too, _ = ours.step(action)
            assert [reward, terminated, truncated] == ours_too
            if terminated or truncated:
                ends += 1
                assert np.array_equal(expected[:3], observed[:3])
                expected, _ = theirs.reset()
                observed, _ = ours.reset()
    assert compared == 1000 and ends >= 2


def test_the_last_frame_of_a_game_that_ends_inside_the_skip_is_the_true_one():
    """Where gymnasium repeats an old frame: ours is what the emulator shows, resized."""
    import cv2

    env = AtariGame("BreakoutNoFrameskip-v4", seed=1, max_episode_frames=402, noop_max=0, **PLAIN)  # 402 % 4 == 2
    env.reset()
    ended = False
    while not ended:
        observed, _, terminated, truncated, _ = env.step(env.action_space.sample())
        ended = terminated or truncated
    shown = env.unwrapped.ale.getScreenGrayscale()
    assert np.array_equal(observed[3], cv2.resize(shown, (84, 84), interpolation=cv2.INTER_AREA))


def test_a_lost_life_ends_the_episode_but_not_the_game():
    env = AtariGame("BreakoutNoFrameskip-v4", seed=3)
    env.reset()
    lives, ends, games = [env.unwrapped.ale.lives()], 0, []
    while not games:
        _, _, terminated, _, _ = env.step(2)
        if terminated:
            ends += 1
            observed, info = env.reset()
            assert (observed == observed[0]).all()
            lives.append(env.unwrapped.ale.lives())
            games = info.get("games", [])
    assert lives == [5, 4, 3, 2, 1, 5] and ends == 5 and len(games) == 1


def test_fire_is_pressed_where_the_game_has_it():
    """Without fire Breakout's ball never comes into play, so that no life is ever lost."""

    def lives_lost(fire_reset):
        env = AtariGame("BreakoutNoFrameskip-v4", seed=1, fire_reset=fire_reset)
        env.reset()
        return sum(env.step(0)[2] for _ in range(200))

    assert lives_lost(True) > 0 and lives_lost(False) == 0
    assert AtariGame("BreakoutNoFrameskip-v4").fire_reset and not AtariGame("FreewayNoFrameskip-v4").fire_reset


def test_an_explicit_reset_starts_a_new_game():
    env = AtariGame("BreakoutNoFrameskip-v4", seed=1)
    first, _ = env.reset(seed=1)
    for again in ({"seed": 1}, {"options": {"new": True}}, {}):
        while env.unwrapped.ale.lives() == 5:
            _, _, terminated, _, _ = env.step(0)
        assert terminated
        if not again:  # without a seed or options: the game goes on only right after a lost life
            env.step(0)
        observed, info = env.reset(**again)
        assert env.unwrapped.ale.lives() == 5 and "games" not in info, again
        assert np.array_equal(first, observed) or "seed" not in again


def test_seeds():
    def play(seed, steps=60):
        env = AtariGame("SpaceInvadersNoFrameskip-v4", seed)
        observed = [env.reset()[0]]
        return np.stack(observed + [env.step(i % 6)[0] for i in range(steps)])

    assert np.array_equal(play(0), play(0))
    assert not np.array_equal(play(0), play(1))


def test_no_op_counts_vary_within_a_run():
    env = AtariGame("PongNoFrameskip-v4", seed=1, fire_reset=False)
    counts = []
    for _ in range(10):
        env._life_lost = False
        env.reset()
        counts.append(env.unwrapped.ale.getEpisodeFrameNumber())
    assert len(set(counts)) > 4 and min(counts) >= 1 and max(counts) <= 30


@pytest.mark.parametrize("env_id", ["ALE/Backgammon-v5", "ALE/VideoCheckers-v5", "PongNoFrameskip-v4"])
def test_no_ops_press_nothing(env_id):
    """Also in games whose action 0 is FIRE."""
    env = AtariGame(env_id, seed=1, fire_reset=False)
    act, pressed = env.unwrapped.ale.act, set()
    env.env.ale = Spy(env.unwrapped.ale)
    env.env.ale.act = lambda action: pressed.add(action) or act(action)
    env.reset()
    env._life_lost = True
    env.reset()
    assert pressed == {ale_py.Action.NOOP}


def test_no_no_ops():
    env = AtariGame("BreakoutNoFrameskip-v4", noop_max=0, fire_reset=False)
    env.reset(seed=1)
    assert env.unwrapped.ale.getEpisodeFrameNumber() == 0


@pytest.mark.parametrize("env_id, sticky", [("ALE/Breakout-v5", 0.25), ("BreakoutNoFrameskip-v4", 0.0)])
def test_four_frames_an_action_and_the_ids_own_sticky_actions(env_id, sticky):
    env = AtariGame(env_id, seed=1)
    env.reset()
    before = env.unwrapped.ale.getEpisodeFrameNumber()
    for _ in range(5):
        env.step(2)
    assert env.unwrapped.ale.getEpisodeFrameNumber() - before == 20
    assert env.unwrapped.ale.getFloat("repeat_action_probability") == pytest.approx(sticky)


def test_scores_are_raw_and_rewards_are_signs():
    """Seaquest pays 20 a fish: the agent sees 1, the game's score is the sum of what the emulator paid."""
    env = AtariGame("SeaquestNoFrameskip-v4", seed=2)
    act, paid = env.unwrapped.ale.act, [0.0]
    env.env.ale = Spy(env.unwrapped.ale)
    env.env.ale.act = lambda *a: paid.__setitem__(0, paid[0] + (r := act(*a))) or r
    env.reset()
    seen, games, steps = set(), [], 0
    while not games:
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        steps += 1
        seen.add(reward)
        if terminated or truncated:
            score = paid[0]
            games = env.reset()[1].get("games", [])
    assert seen == {0.0, 1.0} and games == [(score, steps)] and score >= 20


class Spy:
    """An emulator that counts its games: each `reset_game` begins one."""

    def __init__(self, ale):
        object.__setattr__(self, "ale", ale)
        object.__setattr__(self, "begun", 0)
        object.__setattr__(self, "over_before", [])

    def reset_game(self):
        self.over_before.append(self.ale.game_over())
        object.__setattr__(self, "begun", self.begun + 1)
        self.ale.reset_game()

    def __getattr__(self, name):
        return getattr(self.ale, name)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_every_finished_game_is_reported_once(kind):
    """Short time limits; each new game but the first of an environment follows on a finished one. Some end inside a
    reset: their length is 0."""
    limits, spies = [24, 34, 38, 64], []

    def make(seed, limit):
        def thunk():
            env = AtariGame("BreakoutNoFrameskip-v4", seed, max_episode_frames=limit)
            env.env.ale = Spy(env.env.ale)
            spies.append(env.env.ale)
            return env

        return thunk

    envs = make_vector([make(seed, limit) for seed, limit in enumerate(limits)], kind)
    _, infos = envs.reset()
    envs.action_space.seed(0)
    games, by_env = [], [0, 0, 0, 0]
    for _ in range(400):
        games += finished_games(infos)
        for e in np.flatnonzero(infos.get("_games", False)):
            by_env[e] += len(infos["games"][e])
            assert all(length <= -(-limits[e] // 4) for _, length in infos["games"][e])
        *_, infos = envs.step(envs.action_space.sample())
    if kind == "sync":  # in worker processes the spies are out of reach; the games must be the same
        finished = [sum(spy.over_before) for spy in spies[-4:]]
        assert all(spy.begun == 1 + n for spy, n in zip(spies[-4:], finished, strict=True)), (
            "only finished games are followed"
        )
        last = [len(infos["games"][e]) if e in np.flatnonzero(infos.get("_games", False)) else 0 for e in range(4)]
        assert [n + m for n, m in zip(by_env, last, strict=True)] == finished and sum(by_env) == len(games)
    envs.close()
    assert len(games) >= 200
    assert sum(length == 0 for _, length in games) >= 3


def test_frames_keep_the_channel_first_and_the_keywords_work():
    env = ppo_atari.make_env("PongNoFrameskip-v4", 1, False, "x", screen_size=42, frame_stack=2, frame_skip=2)()
    observed, _ = env.reset()
    assert observed.shape == (2, 42, 42) == env.observation_space.shape
    before = env.unwrapped.ale.getEpisodeFrameNumber()
    assert env.step(0)[0].shape == (2, 42, 42)
    assert env.unwrapped.ale.getEpisodeFrameNumber() == before + 2


def test_same_step_autoreset_has_the_final_observation():
    envs = make_vector([ppo_atari.make_env("PongNoFrameskip-v4", 1, False, "x", max_episode_frames=200)], "sync")
    envs.reset()
    while True:
        observed, _, terminated, truncated, infos = envs.step(np.array([0]))
        if truncated[0]:
            break
    assert not terminated[0]
    assert infos["final_obs"][0].shape == (4, 84, 84)
    assert not np.array_equal(infos["final_obs"][0], observed[0])
    assert (observed[0] == observed[0][0]).all()
