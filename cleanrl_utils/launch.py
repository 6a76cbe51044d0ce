"""Start a training script so that its signals and its exit code arrive: python -m cleanrl_utils.launch --help"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from types import FrameType

from cleanrl_utils import EXIT_INTERRUPTED, EXIT_PREEMPTED  # not torch: signals are to be heard from the start on

HELP = """usage: python -m cleanrl_utils.launch [TORCHRUN OPTIONS] SCRIPT.py [FLAGS OF THE SCRIPT]

Starts torchrun with its options, or without any of them the script as one process:

    python -m cleanrl_utils.launch --standalone --nproc_per_node=2 ppo_atari_multigpu.py --run-name first --resume
    python -m cleanrl_utils.launch ppo_atari.py --run-name first --resume

SIGTERM, SIGINT and SIGUSR1 end the job after the iteration, with a checkpoint. The exit code is the script's: 0 done,
1 a fault, 2 bad usage, 75 preempted (start the same command again), 130 interrupted. torchrun alone reports 1 for all
of these, and ends at once at SIGUSR1. Nobody outlives the launcher.
"""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SHUTDOWN_TIMEOUT = (
    600  # seconds that torchrun gives an iteration to end, instead of 30; what sent the signal may give less
)


def command(argv: list[str]) -> tuple[list[str], signal.Signals]:
    """The command that `argv` asks for, and the signal by which it is told to stop."""
    script = next((i for i, word in enumerate(argv) if word.endswith(".py")), None)
    if script is None:
        print(f"error: no script among the arguments: {' '.join(argv)} (see --help)", file=sys.stderr)
        sys.exit(2)
    if script == 0:
        return [sys.executable, *argv], signal.SIGTERM
    # A signal that a scheduler sends to all processes reaches torchrun too, and a second one makes it kill its workers
    # at once. So it listens to this one only, which comes from here, once.
    own = [f"--signals-to-handle={signal.SIGUSR2.name}", f"--shutdown-timeout={SHUTDOWN_TIMEOUT}"]
    return [sys.executable, "-m", "torch.distributed.run", *own, *argv], signal.SIGUSR2


def prepare(stop: signal.Signals) -> None:
    """In the child: the launcher alone answers for signals, and the kernel stops the job when it is gone."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if stop == signal.SIGUSR2 else signal.SIG_DFL)
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, stop)


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
    with tempfile.TemporaryDirectory() as folder:
        status = os.path.join(folder, "status")
        env = {
            **os.environ,
            "CLEANRL_STATUS_FILE": status,
            # where nodes come and go, a store shared with the rendezvous brings both agents down (torch 2.13)
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        child = subprocess.Popen(line, env=env, preexec_fn=lambda: prepare(stop))
        if received:
            child.send_signal(stop)
        code = child.wait()
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
