"""Runs a training script unchanged and records what it did: `record(script, out, flags)`, or by these as a command line

Each process writes OUT/rank{r}.npz with `actions` of its environments, (iterations * num_steps, num_envs), `params`
at the start of each iteration and at the end, (iterations + 1, number of parameters), and `optimizer_steps` done
before each of these.
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


def record(path, out, flags):
    """Run the script in this process; it leaves as the script does, by SystemExit."""
    sys.argv = [path, *flags]
    script = load(path)
    rank = int(os.environ.get("RANK", "0"))
    agents, actions, params, optimizer_steps, steps = [], [], [], [], [0]

    class RecordedAgent(script.Agent):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            agents.append(self)

    class RecordedAdam(torch.optim.Adam):
        def step(self, *args, **kwargs):
            steps[0] += 1
            return super().step(*args, **kwargs)

    def take():
        params.append(torch.cat([p.detach().cpu().flatten() for p in agents[0].parameters()]).numpy())
        optimizer_steps.append(steps[0])

    make_vector, learning_rate = script.make_vector, script.learning_rate

    def recorded_vector(*args, **kwargs):
        envs = make_vector(*args, **kwargs)
        step = envs.step

        def recorded_step(action):
            actions.append(np.array(action))
            return step(action)

        envs.step = recorded_step
        return envs

    def recorded_learning_rate(*args, **kwargs):  # which the scripts call once, at the start of an iteration
        take()
        return learning_rate(*args, **kwargs)

    script.Agent, script.optim = RecordedAgent, type("optim", (), {"Adam": RecordedAdam})
    script.make_vector, script.learning_rate = recorded_vector, recorded_learning_rate
    try:
        script.process.run(script.main, script.Args, path)
    finally:
        take()
        os.makedirs(out, exist_ok=True)
        np.savez(f"{out}/rank{rank}.npz", actions=actions, params=params, optimizer_steps=optimizer_steps)


def record_in_worker(env, folder, *args):
    """`record`, in a new process that is one of several."""
    os.environ.update(env)
    os.chdir(folder)
    record(*args)


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2], sys.argv[3:])
