"""Stable-Baselines3's PPO at the work of throughput.py: python sb3_ppo.py ENV_ID NUM_ENVS TIMESTEPS {dummy,subproc}"""

import sys
from typing import Any

import ale_py
import gymnasium as gym
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

gym.register_envs(ale_py)


def main(env_id: str, num_envs: str, timesteps: str, kind: str) -> None:
    vector: Any = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[kind]
    envs = VecFrameStack(make_atari_env(env_id, n_envs=int(num_envs), seed=1, vec_env_cls=vector), 4)
    model = PPO(
        "CnnPolicy",
        envs,
        n_steps=128,
        batch_size=128 * int(num_envs) // 4,
        n_epochs=4,
        learning_rate=2.5e-4,
        clip_range=0.1,
        ent_coef=0.01,
        vf_coef=0.5,
        tensorboard_log="runs",
        device="cpu",
    )
    model.learn(int(timesteps), log_interval=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
