"""How training scales over processes on this machine: weak and strong scaling, and what the all_reduce takes.

  weak      8 environments in each of 1, 2, ... processes: the ideal is that steps/s grow as the processes do
  strong    16 environments of the whole job on 1, 2, ... processes: the same training run, sooner
  hosts     two processes on two hosts, which are network namespaces of this machine joined by a cable with the given
            latency, by static rendezvous and gloo (needs root and Linux's `ip` and `tc`; skipped with a line elsewhere)

Each process computes with one thread, so that one process alone does not use the others' cores.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import common
import tyro

SCRIPT = str(common.ROOT / "ppo_atari_multigpu.py")
STEPS = 128


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"
    """the game"""
    nproc: tuple[int, ...] = tuple(2**i for i in range(len(os.sched_getaffinity(0)).bit_length()))
    """numbers of processes"""
    iterations: int = 7
    """iterations of each training; the first 2 are not counted"""
    rounds: int = 3
    """how often each is measured"""
    latency_ms: tuple[float, ...] = (0.0, 1.0)
    """round-trip latencies of the cable between two hosts; --latency-ms with nothing after it skips the hosts"""
    out: str = "benchmarks/results"
    """folder for scaling.json and scaling.png"""


def flags(args: Args, total_num_envs: int) -> list[str]:
    timesteps = str(args.iterations * total_num_envs * STEPS)
    sizes = ["--total-num-envs", str(total_num_envs), "--total-timesteps", timesteps]
    return [SCRIPT, "--env-id", args.env_id, *sizes, "--num-threads", "1"]


@contextlib.contextmanager
def two_hosts(latency_ms: float) -> Iterator[list[str]]:
    """Two network namespaces with an interface eth0 each, joined by a cable; their names."""
    names = [f"cleanrl-{os.getpid()}-{i}" for i in (0, 1)]

    def ip(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, text=True)

    try:
        for name in names:
            ip("ip", "netns", "add", name)
        ends = [["name", "eth0", "netns", name] for name in names]
        ip("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for i, name in enumerate(names):
            inside = ["ip", "-n", name]
            ip(*inside, "addr", "add", f"10.213.0.{i + 1}/24", "dev", "eth0")
            ip(*inside, "link", "set", "eth0", "up")
            ip(*inside, "link", "set", "lo", "up")
            if latency_ms:
                delay = ["root", "netem", "delay", f"{latency_ms / 2}ms"]
                ip("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *delay)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on_two_hosts(args: Args, latency_ms: float) -> tuple[float, dict[str, float]]:
    with two_hosts(latency_ms) as names, tempfile.TemporaryDirectory() as folder:
        lines = []
        for rank, name in enumerate(names):
            static = ["--nnodes=2", f"--node_rank={rank}", "--master_addr=10.213.0.1", "--master_port=29400"]
            launch = [sys.executable, "-m", "torch.distributed.run", *static, "--nproc_per_node=1"]
            lines.append(["ip", "netns", "exec", name, *launch, *flags(args, 16)])
        env = {"GLOO_SOCKET_IFNAME": "eth0"}
        other = subprocess.Popen(lines[1], cwd=folder, env={**os.environ, **env}, stderr=subprocess.DEVNULL)
        stopper = threading.Timer(600, other.kill)
        stopper.start()
        try:
            return common.train(lines[0], 16 * STEPS, env=env)
        finally:
            other.wait()
            stopper.cancel()


def main(args: Args) -> None:
    def contender(nproc: int, total: int):
        return lambda: common.train([*common.torchrun(nproc), *flags(args, total)], total * STEPS)

    weak = {f"weak {n} x 8": contender(n, 8 * n) for n in args.nproc}
    # on two processes the strong one is the weak one
    strong = {f"strong {n} x {16 / n:g}": contender(n, 16) for n in args.nproc if n <= 16 and n != 2}
    hosts = {}
    if args.latency_ms and (os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc"))):
        print("hosts: skipped, needs root and the commands ip and tc", file=sys.stderr)
    else:
        for latency in args.latency_ms:
            try:
                with two_hosts(latency):
                    pass
            except (subprocess.CalledProcessError, OSError) as error:
                reason = getattr(error, "stderr", None) or error
                print(f"hosts with {latency:g} ms: skipped, {str(reason).strip()}", file=sys.stderr)
                continue
            hosts[f"hosts 2 x 8, {latency:g} ms"] = lambda latency=latency: on_two_hosts(args, latency)
    measured = common.in_turns({**weak, **strong, **hosts}, args.rounds)
    first = f"weak {min(args.nproc)} x 8"
    common.report("scaling", f"Scaling on {args.env_id}", "steps/s", measured, first, args.out, args)
    for n in args.nproc:
        base, now = measured[first].values, measured[f"weak {n} x 8"].values
        efficiency = [100 * b / (a * n / min(args.nproc)) for a, b in zip(base, now, strict=True)]
        share = common.spread([100 * x for x in measured[f"weak {n} x 8"].notes["allreduce"]], 1)
        print(f"weak scaling to {n}: {common.spread(efficiency, 0)} % of the ideal, all_reduce {share} % of the time")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
