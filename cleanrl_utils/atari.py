"""One Atari game as an agent sees it, a vector of them, and a video recorder.

`AtariGame` does what baselines' and gymnasium's stacks of wrappers do (Mnih et al. 2015; Machado et al. 2018,
https://arxiv.org/abs/1709.06009), but calls the emulator directly: it reads only the two frames that it needs, in
gray, into one buffer. Its pixels equal gymnasium's `AtariPreprocessing` + `FrameStackObservation` bit for bit.
"""

import difflib
import os
from collections.abc import Callable, Sequence
from typing import Any

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from cleanrl_utils.config import say
from cleanrl_utils.pool import PoolVectorEnv
from cleanrl_utils.process import cores

gym.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
cv2.setNumThreads(1)  # its thread pool costs more than it gives on frames this small, and the processes share the cores

NOOP = ale_py.Action.NOOP  # Backgammon and VideoCheckers don't offer it: their action 0 is FIRE
FIRE_SEQUENCE = (1, 2)  # baselines' FireResetEnv: FIRE, then the second action, with which some games start


class AtariGame(gym.Wrapper):
    """Preprocessed Atari with observations uint8 (frame_stack, screen_size, screen_size), channel first.

    In the order of work, from the emulator out: `noop_max` (1..noop_max no-op frames after a new game; 0: none),
    `frame_skip` with a max over its last two frames, gray, area resize to `screen_size`, `episodic_life` (a lost life
    ends the episode, not the game), `fire_reset` (press FIRE where the game has it), `clip_reward` (the sign of the
    skip's summed reward), `frame_stack` (after a reset all frames are the reset frame).

    A life lost inside the skip does not cut it. A game that ends inside the skip does, and its last frame is the
    observation. After `max_episode_frames` emulator frames the game is truncated.

    `reset()` after a lost life goes on with the game; every other reset, and any with a seed or options, starts a new
    one. The first reset uses `seed` unless it is given another.

    A finished game is reported once, wherever it ended (also inside the no-ops or the fire of a reset): the next
    reset's info has `games`, a list of (episodic_return, episodic_length), the raw score over all lives and the
    agent's steps. A game cut off by an explicit new one is not finished.
    """

    STATE = ("_pending_seed", "_lives", "_life_lost", "_games", "_return", "_length")  # with what `state` lists

    def __init__(
        self,
        env_id: str,
        seed: int | None = None,
        *,
        noop_max: int = 30,
        frame_skip: int = 4,
        screen_size: int = 84,
        episodic_life: bool = True,
        fire_reset: bool = True,
        clip_reward: bool = True,
        frame_stack: int = 4,
        max_episode_frames: int = 108_000,
        recorder: "VideoRecorder | None" = None,
    ):
        # frameskip=1: the ALE/*-v5 ids skip 4 frames by themselves. Their sticky actions stay as they are.
        raw = gym.make(
            env_id,
            frameskip=1,
            max_num_frames_per_episode=max_episode_frames,
            disable_env_checker=True,
            render_mode="rgb_array",
        )
        super().__init__(raw.unwrapped)
        self.env: ale_py.AtariEnv  # the emulator keeps the time limit: gymnasium's wrappers have nothing to add
        self.noop_max, self.frame_skip, self.screen_size = noop_max, frame_skip, screen_size
        self.episodic_life, self.clip_reward, self.recorder = episodic_life, clip_reward, recorder
        self._actions = self.env._action_set
        self.fire_reset = fire_reset and ale_py.Action.FIRE in self._actions[1:2]
        self.observation_space = gym.spaces.Box(0, 255, (frame_stack, screen_size, screen_size), np.uint8)
        self._pending_seed = seed
        self._frames = np.empty((2, *self.env.ale.getScreenDims()), np.uint8)  # the last two of the skip
        self._stack = np.zeros(self.observation_space.shape, np.uint8)
        self._asked = NOOP  # the action of the last step
        self._lives = 0
        self._life_lost = False  # the last step ended an episode, but not the game
        self._games: list[tuple[float, int]] = []  # finished, not yet reported
        self._return, self._length = 0.0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        full = seed is not None or bool(options)
        seed, self._pending_seed = (self._pending_seed if seed is None else seed), None
        if full or not self._life_lost:
            self._new_game(seed)
        else:
            self._act(NOOP)  # as in baselines' EpisodicLifeEnv: one skip to leave the frame of the lost life
        if self.fire_reset:
            for action in FIRE_SEQUENCE:
                self._act(self._actions[action])
        self._life_lost = False
        self._lives = self.env.ale.lives()
        self._stack[:] = self._screen()
        info, self._games = {"games": self._games} if self._games else {}, []
        return self._stack.copy(), info

    def step(self, action: int):
        reward, terminated, truncated = self._skip(self._actions[action])
        self._length += 1
        lives = self.env.ale.lives()
        over = terminated or truncated
        if over:
            self._games.append((self._return, self._length))
        self._life_lost = self.episodic_life and lives < self._lives and not over
        self._lives = lives
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = self._screen()
        if self.recorder:
            self.recorder.frame(self.env.ale.getScreenRGB())
        reward = float(np.sign(reward)) if self.clip_reward else reward
        return self._stack.copy(), reward, terminated or self._life_lost, truncated, {}

    def _skip(self, action: ale_py.Action) -> tuple[float, bool, bool]:
        """Repeat an action; afterwards `_frames[0]` is the max over the skip's last two frames."""
        ale, reward, read = self.env.ale, 0.0, 0
        self._asked = action
        for t in range(self.frame_skip):
            reward += ale.act(action)
            over = ale.game_over()  # terminated or truncated
            if over or t >= self.frame_skip - 2:
                ale.getScreenGrayscale(self._frames[read])
                read += 1
            if over:
                break
        if read == 2:
            np.maximum(self._frames[0], self._frames[1], out=self._frames[0])
        self._return += reward
        return reward, ale.game_over(with_truncation=False), ale.game_truncated()

    def _act(self, action: ale_py.Action) -> None:
        """A skip inside a reset. If the game ends in it, it counts as finished, and the next one begins."""
        _, terminated, truncated = self._skip(action)
        if terminated or truncated:
            self._games.append((self._return, self._length))
            self._new_game()

    def _new_game(self, seed: int | None = None) -> None:
        if seed is None:
            self.env.ale.reset_game()
        else:
            self.env.reset(seed=seed)
            self.action_space.seed(seed)
        self._begin_count()
        for _ in range(self.env.np_random.integers(1, self.noop_max + 1) if self.noop_max > 0 else 0):
            self._return += self.env.ale.act(NOOP)
            if self.env.ale.game_over():
                self._games.append((self._return, self._length))
                self.env.ale.reset_game()
                self._begin_count()
        self.env.ale.getScreenGrayscale(self._frames[0])

    def _begin_count(self) -> None:
        self._return, self._length = 0.0, 0
        if self.recorder:
            self.recorder.new_game()
            self.recorder.frame(self.env.ale.getScreenRGB())

    def _screen(self) -> np.ndarray:
        return cv2.resize(self._frames[0], (self.screen_size, self.screen_size), interpolation=cv2.INTER_AREA)

    @property
    def state(self) -> dict[str, Any]:
        """All that the rest of the run depends on, incl. the emulator's and numpy's generators (about 45 KB).

        Setting it on another `AtariGame` of the same arguments makes that one go on from here, without a reset.
        """
        return {
            "last_action": self._last_action(),
            "emulator": self._emulator(),
            "generators": [generator.bit_generator.state for generator in self._generators()],
            "stack": torch.from_numpy(self._stack.copy()),
            "recorder": self.recorder.position if self.recorder else None,
            **{name: getattr(self, name) for name in self.STATE},
        }

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        emulator = ale_py.ALEState.__new__(ale_py.ALEState)
        emulator.__setstate__(state["emulator"])
        self._press(state["last_action"])  # at least a frame, without which Qbert goes on differently
        self.env.ale.restoreState(emulator)
        for generator, value in zip(self._generators(), state["generators"], strict=True):
            generator.bit_generator.state = value
        self._stack[:] = state["stack"].numpy()
        if self.recorder:
            self.recorder.position = state["recorder"] or (0, 0)  # (0, 0): the run was not recorded until now
        for name in self.STATE:
            setattr(self, name, state[name])

    def _emulator(self) -> bytes:
        return self.env.ale.cloneState(include_rng=True).__getstate__()

    def _sticky(self) -> bool:
        return self.env.ale.getFloat("repeat_action_probability") > 0

    def _press(self, action: int) -> None:
        """Make `action` the one that a sticky next frame repeats: play it until it surely was not dropped itself."""
        for _ in range(40 if self._sticky() else 1):
            self.env.ale.act(action)

    def _last_action(self) -> int:
        """The action that a sticky next frame repeats, which the emulator's state lacks and no call tells.

        Several frames played from here show which one it is, or that it makes no difference. The emulator is then
        put back.
        """
        ale = self.env.ale
        if not self._sticky():
            return NOOP.value
        here = ale.cloneState(include_rng=True)

        def future() -> list[bytes]:
            return [self._emulator() for _ in range(12) if ale.act(NOOP) is not None]

        truth = future()
        for action in (self._asked, *self._actions):
            self._press(action)
            ale.restoreState(here)
            if future() == truth:
                break
        self._press(action)
        ale.restoreState(here)
        return action.value

    def _generators(self) -> list[np.random.Generator]:
        return [source.np_random for source in (self.env, self.action_space, self.observation_space)]

    def close(self) -> None:
        if self.recorder:
            self.recorder.close()
        super().close()


class VideoRecorder:
    """H.264 files `folder/rl-video-episode-N.mp4` of games 0, 1, 8, 27, ..., 729, then every 1000th.

    Frames go straight to the encoder, so memory does not grow. A file is cut into fragments, so that it plays
    even if the process was killed. `max_frames` caps its length. A resumed run continues a game at frame F of its
    file in `rl-video-episode-N-from-F.mp4`.
    """

    FPS = 15  # the emulator's 60 frames a second, 4 to an agent step

    def __init__(self, folder: str, max_frames: int = 10 * 60 * FPS):
        self.folder, self.max_frames = folder, max_frames
        self.game = -1
        self._frames = self._first_frame = 0
        self._writer: Any = None

    @property
    def position(self) -> tuple[int, int]:
        """(number of the game, frames of it so far); set it to continue there."""
        return self.game, self._frames

    @position.setter
    def position(self, position: tuple[int, int]) -> None:
        self.game, self._frames = position
        self._first_frame = self._frames

    def new_game(self) -> None:
        self.close()
        self.game += 1
        self._frames = self._first_frame = 0

    def wanted(self) -> bool:
        return round(self.game ** (1 / 3)) ** 3 == self.game if self.game < 1000 else self.game % 1000 == 0

    def frame(self, rgb: np.ndarray) -> None:
        """Add one RGB frame, uint8 (height, width, 3), to the current game's file if it gets one."""
        if self._frames >= self.max_frames or not self.wanted():
            return
        try:
            if self._writer is None:
                self._open(rgb.shape[1::-1])
            self._writer.send(np.ascontiguousarray(rgb))
            self._frames += 1
        except (OSError, RuntimeError) as error:  # a full disk; a signal to all processes, which ended the encoder
            say(f"warning: no more videos: {str(error).splitlines()[0]}")
            self.max_frames = 0

    def _open(self, size: tuple[int, ...]) -> None:
        import imageio_ffmpeg

        os.makedirs(self.folder, exist_ok=True)
        part = f"-from-{self._first_frame}" if self._first_frame else ""
        path, fragments = f"{self.folder}/rl-video-episode-{self.game}{part}.mp4", "+frag_keyframe+empty_moov"
        output = {"output_params": ["-movflags", fragments], "ffmpeg_log_level": "error"}  # blocks of 2 keep 160x210
        self._writer = imageio_ffmpeg.write_frames(path, size, fps=self.FPS, macro_block_size=2, **output)
        self._writer.send(None)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def check_game(args: Any) -> None:
    """Usage error unless `args.env_id` is a registered Atari game; names the nearest ones."""
    games = [name for name, spec in gym.registry.items() if str(spec.entry_point).startswith("ale_py")]
    nearest = difflib.get_close_matches(args.env_id, games, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ", such as BreakoutNoFrameskip-v4"
    args.require("env_id", args.env_id in games, f"must be an Atari game of ale-py{hint}")


def make_vector(thunks: Sequence[Callable[[], gym.Env]], kind: str) -> SyncVectorEnv | PoolVectorEnv:
    """`kind` sync: step the environments in this process, one after the other; async: in workers, one for each core.

    SAME_STEP resets a finished environment within the step that ended it, so each stored step has an action
    that mattered. Gymnasium's default would insert a step whose action is ignored.
    """
    if kind == "sync":
        return SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP)
    return PoolVectorEnv(thunks, num_workers=cores())


def finished_games(infos: dict[str, Any]) -> list[tuple[float, int]]:
    """(episodic_return, episodic_length) of the games that ended in this step or reset of a vector, by environment."""
    return [game for e in np.flatnonzero(infos.get("_games", False)) for game in infos["games"][e]]


def game_states(envs: VectorEnv) -> list[Any]:
    """`AtariGame.state` of each environment of a vector; None for environments of a kind that has no `state`."""
    try:
        return list(envs.get_attr("state"))  # type: ignore[attr-defined]
    except AttributeError:
        return [None] * envs.num_envs
