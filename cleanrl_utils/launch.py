"""Start a training script so that its signals and its exit code arrive: python -m cleanrl_utils.launch --help"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import FrameType
from typing import NoReturn

from cleanrl_utils import EXIT_INTERRUPTED, EXIT_PREEMPTED, STOP_SIGNALS  # not torch: signals must be heard at once

HELP = """usage: python -m cleanrl_utils.launch [TORCHRUN OPTIONS] SCRIPT.py [FLAGS OF THE SCRIPT]

Starts torchrun with its options, or without any of them the script as one process:

    python -m cleanrl_utils.launch --standalone --nproc_per_node=2 ppo_atari_multigpu.py --run-name first --resume
    python -m cleanrl_utils.launch ppo_atari.py --run-name first --resume

SIGTERM, SIGINT, SIGUSR1 and, unless it was started by nohup, SIGHUP end the job after the iteration, with a checkpoint.
The exit code is the script's: 0 done, 1 a fault, 2 bad usage, 75 preempted (start the same command again), 130
interrupted. torchrun alone reports 1 for all of these, and ends at once at SIGUSR1. Nobody outlives the launcher.

In a job that a scheduler has started on several nodes (an AWS Batch multi-node parallel job, a task of srun on each
node, Kubernetes pods with PET_NNODES and PET_MASTER_ADDR), torchrun is told the nodes, this one's rank and the address
of the first one, unless the options name them. Start one launcher on each node.
"""
RENDEZVOUS = ("--standalone", "--nnodes", "--node-rank", "--master-", "--rdzv-")
SHUTDOWN_TIMEOUT = 600  # seconds that torchrun gives an iteration to end, not 30; who sent the signal may give less
PORT = 29400  # of the rendezvous, where the first node is not shared with other jobs


def nodes(env: Mapping[str, str]) -> list[str]:
    """torchrun's options for a job on several nodes, from its scheduler's variables; none for a job on one."""
    port = PORT
    if int(env.get("AWS_BATCH_JOB_NUM_NODES", "1")) > 1:
        count, main = int(env["AWS_BATCH_JOB_NUM_NODES"]), int(env["AWS_BATCH_JOB_MAIN_NODE_INDEX"])
        rank = (int(env["AWS_BATCH_JOB_NODE_INDEX"]) - main) % count
        first = env.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "127.0.0.1")  # the main node lacks it
    elif int(env.get("SLURM_STEP_NUM_NODES", "1")) > 1:  # of srun; SLURM_NNODES is set in a batch script, too
        count, rank = int(env["SLURM_STEP_NUM_NODES"]), int(env["SLURM_NODEID"])
        if env["SLURM_STEP_NUM_TASKS"] != env["SLURM_STEP_NUM_NODES"]:
            refuse(f"srun started {env['SLURM_STEP_NUM_TASKS']} tasks on {count} nodes; use --ntasks-per-node=1")
        lister = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        first = subprocess.run(lister, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[0]
        port = 20_000 + int(env["SLURM_JOB_ID"]) % 10_000  # jobs share nodes
    elif env.get("PET_NNODES", "1").isdigit() and int(env.get("PET_NNODES", "1")) > 1:  # torchrun's own variables
        count, rank = int(env["PET_NNODES"]), int(env.get("PET_NODE_RANK") or env.get("JOB_COMPLETION_INDEX") or -1)
        first, port = env.get("PET_MASTER_ADDR", ""), int(env.get("PET_MASTER_PORT", PORT))
        if rank < 0 or not first:
            refuse("PET_NNODES needs PET_MASTER_ADDR, and PET_NODE_RANK or JOB_COMPLETION_INDEX")
    else:
        return []
    print(f"node {rank} of {count}, the first is {first}:{port}", file=sys.stderr, flush=True)
    return [f"--nnodes={count}", f"--node_rank={rank}", f"--master_addr={first}", f"--master_port={port}"]


def refuse(rule: str) -> NoReturn:
    print(f"error: {rule} (see --help)", file=sys.stderr)
    sys.exit(2)


def command(argv: list[str]) -> tuple[list[str], signal.Signals]:
    """The command that `argv` asks for, and the signal by which it is told to stop."""
    script = next((i for i, word in enumerate(argv) if word.endswith(".py")), None)
    if script is None:
        refuse(f"no script among the arguments: {' '.join(argv)}")
    named = any(word.replace("_", "-").startswith(RENDEZVOUS) for word in argv[:script])
    scheduled = [] if named else nodes(os.environ)
    if script == 0 and not scheduled:
        return [sys.executable, *argv], signal.SIGTERM
    # A signal that a scheduler sends to all processes reaches torchrun too, and a second one makes it kill its workers
    # at once. So it listens to this one only, which comes from here, once.
    own = [f"--signals-to-handle={signal.SIGUSR2.name}", f"--shutdown-timeout={SHUTDOWN_TIMEOUT}"]
    return [sys.executable, "-m", "torch.distributed.run", *own, *scheduled, *argv], signal.SIGUSR2


def prepare(stop: signal.Signals) -> None:
    """In the child: the launcher alone answers for signals, and the kernel stops the job when it is gone."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if stop == signal.SIGUSR2 else signal.SIG_DFL)
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, stop)


def end_orphans() -> None:
    """Kill whom a killed torchrun left behind: the kernel has made them children of this process."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        for pid in file.read().split():
            os.kill(int(pid), signal.SIGKILL)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    line, stop = command(argv)
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None and len(received) == 1:
            child.send_signal(stop)

    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory() as folder:
        status = os.path.join(folder, "status")
        env = {**os.environ, "CLEANRL_STATUS_FILE": status}
        if "--standalone" not in line:
            # Where nodes come and go, a store shared with the rendezvous brings both agents down (torch 2.13). An own
            # one has a port that is chosen now and opened seconds later, by when another program may have it.
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        child = subprocess.Popen(line, env=env, preexec_fn=lambda: prepare(stop))
        if received:
            child.send_signal(stop)
        code = child.wait()
        if code < 0:  # while they import torch, they don't yet end with their parent
            end_orphans()
        written = ""
        if os.path.exists(status):
            with open(status) as file:
                written = file.read()
    asked = EXIT_INTERRUPTED if received[:1] == [signal.SIGINT] else EXIT_PREEMPTED
    if written in ("", str(128 + signal.SIGTERM)):  # the script was killed, or had not begun
        return asked if received else 128 - code if code < 0 else code
    return asked if int(written) == EXIT_PREEMPTED and received else int(written)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
