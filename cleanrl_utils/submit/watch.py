"""The jobs of a submission: their states, a live table, the log of what failed."""

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from cleanrl_utils.config import Fault, UsageError
from cleanrl_utils.runs import progress
from cleanrl_utils.submit.record import Record
from cleanrl_utils.submit.spec import State, Status

ENDED = ("succeeded", "failed", "cancelled")
POLL = {"aws": 10.0, "kubernetes": 5.0, "slurm": 5.0, "docker": 2.0, "local": 1.0}  # seconds
PATIENCE = 300.0  # seconds for which a scheduler that does not answer is asked again
TAIL = 30  # lines of a failed job's log


def statuses(provider: Any, record: Record) -> dict[str, Status]:
    """Each job's status by its name; a job that was not sent is `unknown`."""
    sent = [job for job in record["jobs"] if job["handle"] is not None]
    found = (
        dict(zip([job["name"] for job in sent], provider.statuses([job["handle"] for job in sent]), strict=True))
        if sent
        else {}
    )
    result = {}
    for job in record["jobs"]:
        status = found.get(job["name"], Status("unknown", reason="not sent"))
        if job.get("cancelled") and status.state not in ("running", "succeeded"):
            status = Status("cancelled", status.attempt, status.reason)
        result[job["name"]] = status
    return result


def table(record: Record, found: Mapping[str, Status], logs: Mapping[str, str]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    result = Table(title=f"{record['submission']} ({record['provider']})", title_justify="left")
    for column in ("job", "state", "attempt", "step", "mean return", "reason"):
        result.add_column(column, overflow="fold")
    for job in record["jobs"]:
        status = found[job["name"]]
        now = progress(logs.get(job["name"], ""))
        said = (f"{now.step:,} of {now.total:,}", now.shown_return) if now else ("", "")
        result.add_row(job["name"], status.state, str(status.attempt), *said, escape(status.reason))
    return result


def read_logs(provider: Any, record: Record, found: Mapping[str, Status]) -> dict[str, str]:
    """The end of the log of each job in `found` that has run; without those that can't be reached."""
    logs = {}
    for job in record["jobs"]:
        status = found.get(job["name"])
        if job["handle"] is not None and status and status.state in ("running", "succeeded", "failed"):
            try:
                logs[job["name"]] = provider.log(job["handle"])
            except Fault:
                continue
    return logs


def exit_code(found: Mapping[str, Status]) -> int:
    """0: all have succeeded. 1: some have not."""
    return int(any(status.state != "succeeded" for status in found.values()))


def require_rich() -> None:
    if importlib.util.find_spec("rich") is None:
        raise UsageError("the table needs rich: pip install 'cleanrl-distributed[cloud]'")


def follow(provider: Any, record: Record, once: bool = False, sleep: Callable[[float], None] = time.sleep) -> int:
    """Show the table until all jobs have ended, or once; then the end of each failed job's log. The exit code."""
    require_rich()
    from rich.console import Console
    from rich.live import Live

    console = Console(width=None if sys.stdout.isatty() else 160)  # of a log file: no wrapping at 80
    logs: dict[str, str] = {}
    shown: dict[str, State] = {}
    answered = time.monotonic()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            try:
                found = statuses(provider, record)
                answered = time.monotonic()
            except Fault as fault:
                if once or time.monotonic() - answered > PATIENCE:
                    raise
                console.print(f"warning: {fault}; asking again", markup=False)
                sleep(POLL[record["provider"]])
                continue
            logs |= read_logs(
                provider, record, {name: status for name, status in found.items() if shown.get(name, "") not in ENDED}
            )
            states = {name: status.state for name, status in found.items()}
            if console.is_terminal:
                live.update(table(record, found, logs), refresh=True)
            else:
                for name, state in states.items():
                    if not once and shown.get(name) != state:
                        console.print(f"{name}: {state} {found[name].reason}".rstrip(), soft_wrap=True, markup=False)
            shown = states
            # what was not sent, or is forgotten, does not end any more
            if once or all(state in (*ENDED, "unknown") for state in states.values()):
                break
            sleep(POLL[record["provider"]])
    console.print(table(record, found, logs))
    for job in record["jobs"]:
        if found[job["name"]].state == "failed":
            end = "\n".join(logs.get(job["name"], "").splitlines()[-TAIL:]) or "(no log)"
            console.print(f"\n--- {job['name']}, the end of its log\n{end}", markup=False, highlight=False)
    return exit_code(found)
