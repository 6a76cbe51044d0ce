"""What the training scripts share and nobody tweaks. The algorithms are in the scripts themselves.

| module        | what a script takes from it                                                    |
|---------------|--------------------------------------------------------------------------------|
| `config`      | `RunArgs` (the flags every script shares), number ranges, one-line errors, `run` |
| `seeding`     | the three levels of seeds: experiment, process, environment                     |
| `atari`       | one Atari game with its preprocessing, the vector of them, the video recorder   |
| `process`     | ranks, device, threads, the process group, exit codes                           |
| `logger`      | TensorBoard, Weights & Biases, progress, time shares                            |
"""
