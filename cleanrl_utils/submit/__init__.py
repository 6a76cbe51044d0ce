"""Submission of training jobs: what `python -m cleanrl_utils.submit_exp` is made of.

| module        | what it is                                                                              |
|---------------|-----------------------------------------------------------------------------------------|
| `spec`        | `JobSpec`, one job for every provider, and the rules that all providers share            |
| `aws`, `kubernetes`, `slurm`, `docker`, `local` | a provider                                            |
| `script`      | whether the script takes the flags that its jobs would give it                           |
| `record`      | the file that remembers a submission                                                     |
| `watch`       | the live table                                                                           |

A provider is a module of functions: `check(spec)` raises a usage error for what it can't run; `reach(specs)` asks
whether it is there and can run them; `render(spec)` is pure and returns what would be sent, `show` makes it text;
`send(spec, rendered)` sends it and returns a handle for the record; `statuses(handles)`, `log(handle)` and
`cancel(handle)` act on what was sent.
"""
