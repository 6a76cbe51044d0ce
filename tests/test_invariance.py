"""The number of processes never changes the mathematics; and the faults that would, planted, are noticed.

Rounding differs with the number of processes and of threads. Once a network unit or a clipped ratio falls on the
other side of its kink, such runs part, the sooner the larger the steps: at a learning rate of 1e-4 the parameters stay
within 1e-6 for these 20 iterations, so 1e-4 leaves room for other processors.
"""

import numpy as np
import pytest
from ablation import changed
from conftest import MULTI, ROOT, SINGLE, SMALL

ITERATIONS, NUM_ENVS, NUM_STEPS = 20, 6, 16
FLAGS = [
    *(*SMALL, "--no-anneal-lr", "--total-num-envs", NUM_ENVS, "--grad-accumulation-steps", 2),
    *("--target-kl", 1e-6, "--learning-rate", 1e-4, "--num-threads", 1),
]
SHARES = {1: [6], 2: [3, 3], 3: [2, 2, 2], 4: [2, 2, 1, 1]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    from conftest import Folder

    folder = Folder(tmp_path_factory.mktemp("alone"))
    (record,) = folder.recorded(MULTI, "out", *steps(ITERATIONS), *FLAGS)
    return record


def steps(iterations):
    return "--total-timesteps", iterations * NUM_ENVS * NUM_STEPS


def difference(alone, records, iterations=ITERATIONS):
    """(actions that differ, largest difference of a parameter over the iterations and processes)."""
    actions = np.concatenate([r["actions"] for r in records], axis=1)
    expected, params = alone["actions"][: iterations * NUM_STEPS], alone["params"][: iterations + 1]
    assert actions.shape == expected.shape == (iterations * NUM_STEPS, NUM_ENVS)
    assert len(params) == iterations + 1
    return (actions != expected).sum(), max(np.abs(r["params"] - params).max() for r in records)


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_any_number_of_processes_is_the_same_run(folder, alone, nproc):
    records = folder.recorded(MULTI, "out", *steps(ITERATIONS), *FLAGS, nproc=nproc)
    assert [r["actions"].shape[1] for r in records] == SHARES[nproc]
    different_actions, largest = difference(alone, records)
    assert different_actions == 0
    assert largest < 1e-4
    for r in records[1:]:  # all processes hold the same weights, to the bit
        assert np.array_equal(r["params"], records[0]["params"])


def test_the_run_does_what_the_invariance_is_about(alone):
    steps = np.diff(alone["optimizer_steps"])
    assert set(steps) == {2, 4}, "the KL stop must be in play: some iterations end after the first epoch, some do not"
    assert np.abs(np.diff(alone["params"], axis=0)).max(axis=1).min() > 1e-6, "every iteration must change the weights"
    assert len(np.unique(alone["actions"])) > 1


FAULTS = {
    "seeds from the rank": (
        "seeding.env_seeds(args.seed, first_env, num_envs)",
        "[args.seed + rank + i for i in range(num_envs)]",
    ),
    "noise from the rank": (
        "generator)[:, mine].to(device)",
        "generator)[:, :num_envs].to(device)",
    ),
    "local advantage moments": ("            dist.all_reduce(moments, group=group)", "            pass"),
    "mean of means on uneven shares": (
        "args.vf_coef * v_loss) / minibatch_size",
        "args.vf_coef * v_loss) / (len(mb_all) * world_size)",
    ),
    "clip before reduce": (
        "                all_reduce(flat_grad)",
        "                flat_grad *= (args.max_grad_norm / world_size / (flat_grad.norm() + 1e-6)).clamp(max=1.0)\n"
        "                all_reduce(flat_grad)",
    ),
    "mean instead of sum": (
        "                all_reduce(flat_grad)",
        "                all_reduce(flat_grad); flat_grad /= world_size",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(folder, alone, fault):
    right, wrong = FAULTS[fault]
    source = (ROOT / MULTI).read_text()
    assert source.count(right) == 1, f"the line of this fault has changed: {right}"
    (folder.path / "faulty.py").write_text(source.replace(right, wrong))
    script = str(folder.path / "faulty.py")
    nproc = 4 if "uneven" in fault else 2  # shares 2, 2, 1, 1 or 3, 3
    records = folder.recorded(script, "out", *steps(4), *FLAGS, nproc=nproc)
    different_actions, largest = difference(alone, records, iterations=4)
    assert different_actions > 0 or largest > 1e-4


def test_gradients_that_are_not_reduced_end_the_job(folder):
    """Each process would train alone: the checksum of the weights notices it in the first iteration."""
    source = (ROOT / MULTI).read_text()
    right = "                all_reduce(flat_grad)"
    assert source.count(right) == 1
    (folder.path / "faulty.py").write_text(source.replace(right, "                pass"))
    from conftest import command

    done = folder.run(command(str(folder.path / "faulty.py"), "--num-envs", 2, *SMALL, nproc=2), code=1)
    assert done.stderr.count("error: iteration 1: the processes' weights have parted") == 1


@pytest.mark.parametrize(
    "flags", [["--grad-accumulation-steps", 3, "--target-kl", 1e-4], ["--lr-warmup-iterations", 3]]
)
def test_multigpu_alone_is_bit_equal_to_ppo_atari(folder, flags):
    flags = ["--num-envs", 3, "--total-timesteps", 4 * 3 * 16, *SMALL, *flags]
    (single,) = folder.recorded(SINGLE, "single", *flags)
    (multi,) = folder.recorded(MULTI, "multi", *flags)
    for key in ("actions", "params", "optimizer_steps"):
        assert np.array_equal(single[key], multi[key])
    assert len(single["params"]) == 5 and not np.array_equal(single["params"][0], single["params"][4])


def test_async_environments_are_bit_equal_to_sync(folder):
    flags = ["--num-envs", 3, "--total-timesteps", 4 * 3 * 64, "--num-steps", 64]
    (sync,) = folder.recorded(SINGLE, "sync", *flags)
    (worker,) = folder.recorded(SINGLE, "async", *flags, "--vector-env", "async")
    assert np.array_equal(sync["actions"], worker["actions"]) and np.array_equal(sync["params"], worker["params"])


@pytest.mark.slow
def test_the_compiled_network_is_equal_within_rounding(folder):
    flags = ["--num-envs", 4, "--total-timesteps", 2 * 4 * 16, *SMALL]
    (eager,) = folder.recorded(SINGLE, "eager", *flags)
    (compiled,) = folder.recorded(SINGLE, "compiled", *flags, "--compile")
    assert np.array_equal(eager["actions"], compiled["actions"])
    assert 0 < np.abs(eager["params"] - compiled["params"]).max() < 1e-5


@pytest.mark.parametrize("nproc", [None, 2])
def test_bf16_starts_as_fp32_does_and_stays_near(folder, nproc):
    """Same seeds and initial weights; after two optimizer steps the weights differ by less than these can move them."""
    flags = ["--num-envs", 4 // (nproc or 1), "--total-timesteps", 4 * 16, *SMALL, "--update-epochs", "1"]
    full = folder.recorded(MULTI, "full", *flags, nproc=nproc)[0]
    half = folder.recorded(MULTI, "half", *flags, "--precision", "bf16", nproc=nproc)[0]
    assert np.array_equal(full["params"][0], half["params"][0]) and list(half["optimizer_steps"]) == [0, 2]
    moved, apart = (np.abs(x - full["params"][1]).max() for x in (full["params"][0], half["params"][1]))
    assert 0 < apart < moved


@pytest.mark.parametrize("deviation", ["ordinary-shuffle", "local-advantages"])
def test_ablations_train_otherwise(folder, alone, deviation):
    """The scripts that results/ablation.py prints: all processes agree, on another update of the same rollout."""
    (folder.path / "ablation.py").write_text(changed([deviation]))
    records = folder.recorded(str(folder.path / "ablation.py"), "out", *steps(1), *FLAGS, nproc=2)
    different_actions, largest = difference(alone, records, iterations=1)
    assert different_actions == 0 and largest > 1e-5
    assert np.array_equal(records[0]["params"], records[1]["params"])
