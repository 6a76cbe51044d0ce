"""Which process this is, its device and threads, and how the processes of a job find and check each other."""

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from cleanrl_utils import EXIT_INTERRUPTED, EXIT_PREEMPTED, STOP_SIGNALS
from cleanrl_utils.config import Fault, OwnFault, RunArgs, UsageError, check_run_args, flag_name, parse, require, say


def ranks() -> tuple[int, int, int]:
    """torchrun's (RANK, LOCAL_RANK, WORLD_SIZE); (0, 0, 1) without it.

    RANK identifies the process (who logs, which environments). LOCAL_RANK only chooses its device.
    """
    return _variable("RANK", 0), _variable("LOCAL_RANK", 0), _variable("WORLD_SIZE", 1)


def local_world_size() -> int:
    """Number of processes of the job on this machine."""
    return _variable("LOCAL_WORLD_SIZE", _variable("LOCAL_RANK", 0) + 1)


def _variable(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    require(value.isdecimal(), name, repr(value), "must be a number, as torchrun sets it")
    return int(value)


def cores() -> int:
    """This process's share of the cores that the job may use on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size())


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def prepare_process(num_threads: int | None) -> None:
    """Threads and memory of this process; under torchrun, also end it when torchrun is gone."""
    unset = (None, "1") if under_torchrun() else (None,)  # torchrun sets 1 where the user set nothing
    if num_threads is not None or os.environ.get("OMP_NUM_THREADS") in unset:  # else torch has read the user's number
        torch.set_num_threads(num_threads or cores())
    keep_freed_memory()
    if under_torchrun():
        die_with_parent()


def keep_freed_memory() -> None:
    """glibc: reuse large freed blocks. To map and zero them again took a fifth of an update; holes add 20 MB."""
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, size = -1, -3, 1 << 30
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, size)
        ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, size)


def die_with_parent() -> None:
    """Linux: the kernel kills this process when the one that started it is gone, however that one ended."""
    PR_SET_PDEATHSIG = 1
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def pick_device(
    cuda: bool, local_rank: int | None = None, backend: str | None = None, device_ids: tuple[int, ...] = ()
) -> torch.device:
    """This process's device: `device_ids[local_rank]`, else `cuda:local_rank`, else the CPU.

    More processes than GPUs share them in turn, over gloo. A usage error says what the machine cannot serve. Without
    a `local_rank`, the script is for one process.
    """
    if local_rank is None:
        rule = f"is one process, not {ranks()[2]}; use ppo_atari_multigpu.py"
        require(ranks()[2] == 1, os.path.basename(sys.argv[0]), "", rule)
        local_rank = 0
    num_local = local_world_size()
    num_gpus = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
    if device_ids:
        shown = " ".join(map(str, device_ids))
        require(num_gpus > 0, "--device-ids", shown, "needs CUDA" + ("" if cuda else ", and --no-cuda is set"))
        rule = f"must be one for each of the {num_local} process(es) of this machine"
        require(len(device_ids) == num_local, "--device-ids", shown, rule)
        rule = f"must be between 0 and {num_gpus - 1}: this machine has {num_gpus} GPU(s)"
        require(all(0 <= i < num_gpus for i in device_ids), "--device-ids", shown, rule)
    ids = device_ids or tuple(i % max(num_gpus, 1) for i in range(num_local))
    if backend == "nccl":
        rule = f"needs CUDA{'' if cuda else ', and --no-cuda is set'}; use gloo"
        require(num_gpus > 0, "--backend", backend, rule)
        rule = f"{num_local} processes can't share {len(set(ids))} GPU(s); use gloo"
        require(len(set(ids)) == num_local, "--backend", backend, rule)
    if num_gpus == 0:
        return torch.device("cpu")
    if len(set(ids)) < num_local and ranks()[0] == 0:
        say(f"notice: {num_local} processes share {len(set(ids))} GPU(s), over gloo")
    torch.set_float32_matmul_precision("high")  # TF32, as convolutions have by default
    device = torch.device("cuda", ids[local_rank])
    torch.cuda.set_device(device)  # before any collective: NCCL would use cuda:0 in every process
    return device


def check_network_flags(args: RunArgs) -> None:
    """Usage error where --compile lacks a compiler; says what --precision bf16 means for this processor."""
    gpu = args.cuda and torch.cuda.is_available()
    if args.compile and not gpu:
        compiler = os.environ.get("CXX", "g++")
        require(shutil.which(compiler) is not None, "--compile", "", f"needs a C++ compiler on the CPU: {compiler}")
    if args.precision == "bf16" and ranks()[0] == 0:
        if gpu:
            units = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            with open("/proc/cpuinfo") as file:
                units = "bf16" in file.read()  # avx512_bf16, amx_bf16; on ARM bf16
        gain = "" if units else ", so that fp32 is faster"
        say(f"notice: bf16: this {'GPU' if gpu else 'processor'} has {'' if units else 'no '}bf16 units{gain}")


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the array on the device; to a GPU by pinned memory, without waiting for the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def connect(args: Any, device: torch.device, backend: str | None) -> dist.ProcessGroup | None:
    """Join the job; returns the group for tensors on `device` (None: the default group, gloo).

    The processes meet over gloo and compare their arguments and devices: a difference is an error on all of them.
    Then they use NCCL on all (each has a GPU of its own) or on none. Without torchrun the job is this process.
    """
    # Now, since the optimizer imports it anyway: its functions' defaults keep the default group of that moment. A group
    # that outlives `disconnect` has threads at the interpreter's end, and these now and then abort the process.
    import torch.distributed.nn.functional

    timeout, (rank, _, world_size) = timedelta(minutes=5), ranks()
    store: dist.Store = dist.HashStore()
    if "RANK" in os.environ or world_size > 1:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            require(name in os.environ, name, "", "is not set, but others of torchrun's variables are")
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it has the addresses of those before a restart, too
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""  # also between containers
    mine = (vars(args), device.type, gpu)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    global met
    met = True
    for rank, (other, device_type, _) in enumerate(everyone):
        for name, value in everyone[0][0].items():
            if other.get(name) != value and name != "device_ids":  # these are each machine's own
                started = f"process 0 was started with {value}, process {rank} with {other.get(name)}"
                raise UsageError(f"{flag_name(name)}: {started}")
        if device_type != everyone[0][1]:
            raise UsageError(f"process 0 runs on {everyone[0][1]}, process {rank} on {device_type}; add --no-cuda")
    apart = len({gpu for _, _, gpu in everyone}) == len(everyone)
    require(backend != "nccl" or apart, "--backend", backend, "each process needs a GPU of its own; use gloo")
    if device.type == "cuda" and apart and backend != "gloo" and dist.is_nccl_available():
        return dist.new_group(backend="nccl", timeout=timeout, device_id=device)
    return None


def disconnect() -> None:
    """Leave the job. Also after an error: otherwise the others learn of it only from the timeout."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather(own: list[Any]) -> list[Any]:
    """Every process's list, joined in the order of the ranks. All processes call it."""
    if not dist.is_initialized():
        return own
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return [item for part in everyone for item in part]


def on_rank_0(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, called in the process of rank 0, in all processes: what it returns, or its error."""
    result: list[Any] = [None, None]
    if ranks()[0] == 0:
        try:
            result[0] = function(*args)
        except (UsageError, Fault) as error:
            result[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise result[1]
    return result[0]


# torchrun's own signals end it, and with it the job. `cleanrl_utils.launch` uses SIGUSR2 to pass one on.
HEARD = [*STOP_SIGNALS, signal.SIGUSR2]


class Stopped(Exception):
    """The run ended early because it was asked to; its message says where it can be continued."""


class StopSignal:
    """From its making on, the stop signals are only noted, so that the iteration can be finished."""

    received: ClassVar[list[int]] = []  # by this process

    def __init__(self) -> None:
        _on_stop_signals(self._note)

    def _note(self, number: int, frame: Any) -> None:
        if not self.received and ranks()[0] == 0:
            with suppress(OSError):  # os.write: print is not for signal handlers
                os.write(2, b"\n" * os.isatty(2) + b"stopping after this iteration\n")
        self.received.append(number)

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop. Reduce it before acting on it."""
        return bool(self.received)


def _on_stop_signals(handler: Any) -> None:
    for number in HEARD:
        signal.signal(number, handler)


def _leave_on_signals(when: str) -> None:
    """Before and after the training a signal ends the process at once: there is nothing to save."""

    def leave(number: int, frame: Any) -> None:
        # torchrun sends a second one; let the closing finish. SIG_IGN prints an error where one is already pending.
        _on_stop_signals(lambda number, frame: None)
        StopSignal.received.append(number)
        raise KeyboardInterrupt(when)

    _on_stop_signals(leave)


def _write_status(code: int | None) -> None:
    """Tell `cleanrl_utils.launch`, since torchrun reports 1 whatever its processes returned. None: not known yet."""
    path = os.environ.get("CLEANRL_STATUS_FILE")
    if path and os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError), open(path, "w") as file:  # a full disk must not change the code
            file.write("" if code is None else str(code))


Args = TypeVar("Args", bound=RunArgs)
met = False  # whether the job's processes have: rank 0 speaks for all of them from then on


def run(main: Callable[[Args, ExitStack], None], args_class: type[Args], file: str) -> NoReturn:
    """Parse the command line, prepare the process, call `main(args, on_exit)` and exit with the job's code.

    Exit codes: 0 done, 1 a fault, 2 bad usage, 75 preempted (start it again), 130 interrupted; all but 0 with one line
    from rank 0 (from each machine before they have met). What `main` registers on the `ExitStack` is always closed.
    """
    code, rank, local_rank = 1, 0, 0
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 - None where it is closed
    try:
        _leave_on_signals("before the training began: there is nothing to save")
        _write_status(None)
        require(ranks()[0] < ranks()[2], "RANK", ranks()[0], f"must be below WORLD_SIZE, {ranks()[2]}")
        require(ranks()[1] < local_world_size(), "LOCAL_RANK", ranks()[1], "must be below LOCAL_WORLD_SIZE")
        rank, local_rank, _ = ranks()
        args = parse(args_class, sys.argv[1:])
        if args.exp_name is None:
            args = replace(args, exp_name=os.path.splitext(os.path.basename(file))[0])
        check_run_args(args)
        check_network_flags(args)
        prepare_process(args.num_threads)
        with ExitStack() as on_exit:
            main(args, on_exit)
            _leave_on_signals("after the training, while its logs were closed")  # an upload may take for ever
        code = 0
    except (UsageError, Fault) as error:
        if rank == 0 or isinstance(error, OwnFault) or (local_rank == 0 and not met):
            say(f"error: {error}")
        else:
            _on_stop_signals(signal.SIG_DFL)
            time.sleep(10 if met else 40)  # torchrun ends all at the first exit: who speaks may still be importing
        code = 2 if isinstance(error, UsageError) else 1
    except (Stopped, KeyboardInterrupt) as stop:
        code = EXIT_INTERRUPTED if StopSignal.received[:1] == [signal.SIGINT] else EXIT_PREEMPTED
        if isinstance(stop, KeyboardInterrupt) and StopSignal.received[:1] == [signal.SIGTERM] and under_torchrun():
            code = 128 + signal.SIGTERM  # perhaps no preemption: torchrun ends the others so where one has failed
        elif rank == 0:
            say(f"stopped {stop}")
    except SystemExit as leave:  # --help
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        raise
    finally:
        _write_status(code)
    sys.exit(code)
