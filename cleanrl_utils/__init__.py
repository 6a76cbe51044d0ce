"""What the training scripts share and nobody tweaks. The algorithms are in the scripts themselves.

| module        | what a script takes from it                                                    |
|---------------|--------------------------------------------------------------------------------|
| `config`      | `RunArgs` (the flags every script shares), number ranges, one-line errors, `run` |
| `seeding`     | the three levels of seeds: experiment, process, environment                     |
| `atari`       | one Atari game with its preprocessing, the vector of them, the video recorder   |
| `pool`        | the vector whose environments are stepped by worker processes                   |
| `process`     | ranks, device, threads, the process group, exit codes                           |
| `checkpoint`  | the run's folder, the state of the whole job, and how a start goes on from it    |
| `logger`      | TensorBoard, Weights & Biases, progress, time shares                            |

`python -m cleanrl_utils.launch` starts a script so that its signals and its exit code arrive. The tools are commands
of the same form, which training does not import: `benchmark`, `evaluate`, `report` (with `results`), `tune`, `export`,
`submit_exp`.
"""

import signal

EXIT_PREEMPTED, EXIT_INTERRUPTED = 75, 130  # 75: EX_TEMPFAIL of sysexits.h, try again later
STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]  # a run ends after its iteration
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # a terminal is closed, and the run was not started by nohup
    STOP_SIGNALS.append(signal.SIGHUP)
