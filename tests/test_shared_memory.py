"""The sum over processes in shared memory: exact, in step, and gloo's where memory can't be shared."""

import sys

import pytest
from conftest import ROOT

SUMS = """
import os, random, sys, time
import torch, torch.distributed as dist
from cleanrl_utils.shared_memory import AllReduce

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if "far" in sys.argv:
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # as on several machines
if "full" in sys.argv:
    del os.memfd_create
torch.manual_seed(rank)
random.seed(rank)
for dtype, n in (torch.float32, 1), (torch.float64, 7), (torch.float32, 99_991):
    values = torch.empty(n, dtype=dtype)
    all_reduce = AllReduce(values, None)
    assert bool(all_reduce._rows) == (not sys.argv[1:]), sys.argv
    for _ in range(30):
        values.normal_()
        everyone = [torch.empty_like(values) for _ in range(size)]
        dist.all_gather(everyone, values)
        time.sleep(random.random() / 1000)  # not in step
        for _ in range(2):  # without a pause: the second sum must not reach a process that reads the first
            all_reduce(values)
            expected = everyone[0] + everyone[1]
            for other in everyone[2:]:
                expected += other
            if sys.argv[1:]:
                assert torch.allclose(values, expected, atol=1e-5)  # gloo has another order
            else:
                assert torch.equal(values, expected)
            everyone = [values.clone()] * size
print("equal", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("nproc", "why"), [(2, ""), (3, ""), (2, "far"), (3, "full")])
def test_sums_over_processes(folder, nproc, why):
    (folder.path / "sums.py").write_text(SUMS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    done = folder.run([*torchrun, "sums.py", *filter(None, [why])], PYTHONPATH=str(ROOT))
    assert done.stdout.count("equal") == nproc
    assert done.stderr.count("notice: no memory that the processes can share") == (3 if why == "full" else 0)
