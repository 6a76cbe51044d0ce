"""Milliseconds in which the processes of this machine sum one gradient: over gloo's sockets, and in shared memory.

The processes have nothing else to do, so none waits for a slower one; `time/allreduce` of a training holds that too.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import common
import tyro


@dataclass
class Args:
    nproc: int = len(os.sched_getaffinity(0))
    """processes"""
    size: int = 1_686_693
    """numbers in the gradient; the default is that of the scripts' network for 4 actions"""
    sums: int = 100
    """sums of one measurement, whose median counts"""
    rounds: int = 5
    """measurements of each, in turns"""
    out: str = "benchmarks/results"
    """folder for all_reduce.json and all_reduce.png"""


def child(rank: int, args: Args, port: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from cleanrl_utils.shared_memory import AllReduce

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.nproc), "LOCAL_WORLD_SIZE": str(args.nproc)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    gradient = torch.zeros(args.size)

    def contender(all_reduce: Any):
        def measure() -> float:
            seconds = []
            for _ in range(args.sums):
                start = time.perf_counter()
                all_reduce(gradient)
                seconds.append(time.perf_counter() - start)
            return 1000 * common.middle(seconds)

        return measure

    shared = AllReduce(gradient, None)
    if not shared._rows:
        sys.exit("the processes share no memory: there is nothing to compare")
    contenders = {"gloo": contender(dist.all_reduce), "shared memory": contender(shared)}
    with contextlib.redirect_stderr(sys.stderr if rank == 0 else open(os.devnull, "w")):
        measured = common.in_turns(contenders, args.rounds, warm_up=1)
    if rank == 0:
        pipe.send(measured)
    dist.destroy_process_group()


def main(args: Args) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    processes = [context.Process(target=child, args=(rank, args, port, there)) for rank in range(args.nproc)]
    for process in processes:
        process.start()
    there.close()
    try:
        measured = here.recv()
    except EOFError:  # a child has said why
        sys.exit(1)
    for process in processes:
        process.join()
    title = f"One sum of {4 * args.size / 1e6:.1f} MB over {args.nproc} processes"
    common.report("all_reduce", title, "ms", measured, "gloo", args.out, args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
