"""Runs a training script unchanged and records what it did: python recorded_run.py SCRIPT OUT [FLAGS ...]

Each process writes OUT/rank{r}.npz: the actions of its environments, (iterations * num_steps, num_envs), the
parameters at the start and after each iteration, and the finished games. Tests plant faults through FAULT, a
statement that is executed with the script's module as `script` before it runs.
"""

import importlib.util
import os
import sys

import numpy as np
import torch


def load(path):
    spec = importlib.util.spec_from_file_location("script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["script"] = module
    spec.loader.exec_module(module)
    return module


def main():
    path, out, *flags = sys.argv[1:]
    sys.argv = [path, *flags]
    script = load(path)
    rank = int(os.environ.get("RANK", "0"))
    actions, params = [], []
    agents = []

    class RecordedAgent(script.Agent):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            agents.append(self)

    def flat(tensors):
        return torch.cat([t.detach().cpu().contiguous().flatten() for t in tensors]).double().numpy()

    make_vector = script.make_vector

    def recorded_vector(*args, **kwargs):
        envs = make_vector(*args, **kwargs)
        step = envs.step

        def recorded_step(action):
            actions.append(np.array(action))
            return step(action)

        envs.step = recorded_step
        return envs

    learning_rate = script.learning_rate

    def recorded_learning_rate(*args, **kwargs):  # the scripts call it once at the start of each iteration
        params.append(flat(agents[0].parameters()))
        return learning_rate(*args, **kwargs)

    script.Agent = RecordedAgent
    script.make_vector = recorded_vector
    script.learning_rate = recorded_learning_rate
    exec(os.environ.get("FAULT", ""), {"script": script, "torch": torch, "np": np, "rank": rank})
    try:
        script.process.run(script.main, script.Args, path)
    finally:
        os.makedirs(out, exist_ok=True)
        if agents:
            params.append(flat(agents[0].parameters()))
        np.savez(f"{out}/rank{rank}.npz", actions=np.array(actions), params=np.array(params))


if __name__ == "__main__":
    main()
