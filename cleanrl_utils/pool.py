"""A vector environment whose environments are stepped in blocks by a few worker processes."""

import contextlib
import mmap
import multiprocessing.util
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from cleanrl_utils.config import OwnFault
from cleanrl_utils.process import HEARD, die_with_parent
from cleanrl_utils.seeding import share


class PoolVectorEnv(VectorEnv):
    """What `SyncVectorEnv(thunks, autoreset_mode=SAME_STEP)` does, by `num_workers` processes at once.

    Each worker runs a `SyncVectorEnv` of its contiguous block of the environments, so the results are the same to the
    last bit. Observations come back through shared memory. Gymnasium's `AsyncVectorEnv` has a process, and two messages
    a step, for every environment.
    """

    def __init__(self, thunks: Sequence[Callable[[], gym.Env]], num_workers: int):
        self.num_envs, num_workers = len(thunks), min(num_workers, len(thunks))
        blocks = [share(self.num_envs, worker, num_workers) for worker in range(num_workers)]
        self._blocks = [slice(first, first + count) for first, count in blocks]
        env = thunks[0]()
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        env.close()
        space = self.observation_space
        assert space.shape is not None and space.dtype is not None, "Box observations only"
        size = int(np.prod(space.shape)) * space.dtype.itemsize
        self._obs = np.frombuffer(mmap.mmap(-1, size), space.dtype).reshape(space.shape)  # shared by the workers
        # fork: a worker needs nothing but the emulator, and starts in milliseconds
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._workers = []
        for block in self._blocks:
            here, there = context.Pipe()
            worker = context.Process(target=_work, args=(there, thunks[block], self._obs[block]), daemon=True)
            # It ignores the SIGTERM by which multiprocessing ends those that an interrupted start has left.
            multiprocessing.util.Finalize(None, lambda left=worker: left.pid and left.kill(), exitpriority=0)
            worker.start()
            there.close()
            self._pipes.append(here)
            self._workers.append(worker)

    def reset(self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None):
        seeds = [seed + e for e in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        infos = self._call("reset", [{"seed": seeds[block], "options": options} for block in self._blocks])
        return self._obs.copy(), self._merge(infos)

    def step(self, actions: np.ndarray):
        results = self._call("step", [{"actions": actions[block]} for block in self._blocks])
        rewards, terminated, truncated = (np.concatenate([r[i] for r in results]) for i in range(3))
        return self._obs.copy(), rewards, terminated, truncated, self._merge([r[3] for r in results])

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        results = self._call("call", [{"name": name, "args": args, "kwargs": kwargs}] * len(self._pipes))
        return tuple(value for block in results for value in block)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        values = values if isinstance(values, list | tuple) else [values] * self.num_envs
        self._call("set_attr", [{"name": name, "values": values[block]} for block in self._blocks])

    def close_extras(self, patience: float = 20.0, **kwargs: Any) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a worker that has ended
                pipe.send(("close", {}))
        for pipe, worker in zip(self._pipes, self._workers, strict=True):
            worker.join(patience)  # one whose answer nobody reads does not end by itself
            worker.kill()
            pipe.close()

    def _call(self, command: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """Let all workers do it at once; their results."""
        results: list[Any] = []
        errors = []
        try:
            for pipe, argument in zip(self._pipes, arguments, strict=True):
                with contextlib.suppress(BrokenPipeError):  # its end is noticed below
                    pipe.send((command, argument))
            for pipe in self._pipes:  # all of them, so that no answer is left in a pipe
                error, result = pipe.recv()
                results.append(result)
                errors += [error] if error else []
        except (EOFError, OSError):
            self._workers[len(results)].join(1)
            code = self._workers[len(results)].exitcode
            raise OwnFault(f"a worker process of the environments has ended, exit code {code} (-9: killed)") from None
        if errors:
            kind, message, trace = errors[0]
            raise (AttributeError if kind == "AttributeError" else RuntimeError)(f"{kind}: {message}\n{trace}")
        return results

    def _merge(self, infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The blocks' infos as those of the whole vector: arrays by environment, with masks `_key`."""
        merged: dict[str, Any] = {}
        for key in dict.fromkeys(key for info in infos for key in info):
            parts = [info.get(key) for info in infos]
            like = next(part for part in parts if part is not None)
            if isinstance(like, dict):
                merged[key] = self._merge([part or {} for part in parts])
                continue
            merged[key] = np.full((self.num_envs, *like.shape[1:]), None if like.dtype == object else 0, like.dtype)
            for block, part in zip(self._blocks, parts, strict=True):
                if part is not None:
                    merged[key][block] = part
        return merged


def _work(pipe: Connection, thunks: Sequence[Callable[[], gym.Env]], obs: np.ndarray) -> None:
    """A worker process. It leaves signals to its parent and does not outlive it."""
    for number in HEARD:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    envs = SyncVectorEnv(thunks, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    while (message := pipe.recv())[0] != "close":
        command, arguments = message
        try:
            if command == "call":
                result = envs.call(arguments["name"], *arguments["args"], **arguments["kwargs"])
            else:
                result = getattr(envs, command)(**arguments)
            if command in ("reset", "step"):
                obs[:] = result[0]
                result = result[1] if command == "reset" else result[1:]
            pipe.send((None, result))
        except Exception as error:  # the parent raises it
            pipe.send(((type(error).__name__, str(error), traceback.format_exc()), None))
    envs.close()
