"""A small game for the learning test: catch the falling block. Importing it registers Catch-v0.

It has as much of `ale_py.AtariEnv` as `AtariGame` uses, and its pictures have Atari's size, so preprocessing, network,
rollout and update are those of a real game. A block falls for FALL frames in one of COLUMNS columns, which the
environment's generator chooses; every STEP frames the paddle moves by one. A catch scores 1, a miss costs a life; a
game has BLOCKS blocks, each of which can be caught after a catch. So BLOCKS is the best score. The columns of each
finished game are a line of games.txt.
"""

import ale_py
import gymnasium as gym
import numpy as np

BLOCKS, COLUMNS, STEP = 4, 3, 4
FALL = (COLUMNS - 1) * STEP  # just enough to cross the screen
HEIGHT, WIDTH = 210, 160
SIZE = WIDTH // COLUMNS


class Catch(gym.Env):
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, frameskip=1, max_num_frames_per_episode=0, render_mode=None):
        assert frameskip == 1
        self._action_set = [ale_py.Action.NOOP, ale_py.Action.RIGHT, ale_py.Action.LEFT]
        self.action_space = gym.spaces.Discrete(len(self._action_set))
        self.observation_space = gym.spaces.Box(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
        self.render_mode = render_mode
        self.ale = self

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.reset_game()
        return self.getScreenRGB(), {}

    # The emulator's part

    def reset_game(self):
        self._columns, self._misses, self._paddle = [], 0, COLUMNS // 2
        self._new_block()

    def _new_block(self):
        self._columns.append(int(self.np_random.integers(COLUMNS)))
        self._age = 0

    def act(self, action):
        self._age += 1
        if self._age % STEP == 0:
            move = (action == ale_py.Action.RIGHT) - (action == ale_py.Action.LEFT)
            self._paddle = min(max(self._paddle + move, 0), COLUMNS - 1)
        if self._age < FALL:
            return 0
        caught = self._paddle == self._columns[-1]
        self._misses += not caught
        if len(self._columns) == BLOCKS:
            with open("games.txt", "a") as file:  # of all processes
                file.write(f"{self._columns}\n")
        self._new_block()
        return int(caught)

    def lives(self):
        return BLOCKS - self._misses

    def game_over(self, with_truncation=True):
        return len(self._columns) > BLOCKS

    def game_truncated(self):
        return False

    def getScreenDims(self):
        return HEIGHT, WIDTH

    def getScreenGrayscale(self, out):
        out[:] = 0
        top = self._age * (HEIGHT - SIZE) // FALL
        out[top : top + SIZE, self._columns[-1] * SIZE : (self._columns[-1] + 1) * SIZE] = 255
        out[-SIZE // 2 :, self._paddle * SIZE : (self._paddle + 1) * SIZE] = 128

    def getScreenRGB(self):
        gray = np.empty((HEIGHT, WIDTH), np.uint8)
        self.getScreenGrayscale(gray)
        return np.repeat(gray[:, :, None], 3, axis=2)

    def render(self):
        return self.getScreenRGB()


gym.register("Catch-v0", entry_point="catch:Catch")
