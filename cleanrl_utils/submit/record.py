"""The local record of a submission, `submissions/{id}.json`: what was to be sent, and what was, with the ids."""

import fcntl
import glob
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from cleanrl_utils.config import UsageError
from cleanrl_utils.submit.spec import Provider

FOLDER = "submissions"
Record = dict[str, Any]
KEYS = {"submission", "provider", "time", "command_line", "request_hash", "jobs"}


def path(submission: str) -> str:
    return f"{FOLDER}/{submission}.json"


def save(record: Record) -> None:
    """Write the whole file, or nothing."""
    os.makedirs(FOLDER, exist_ok=True)
    name = path(record["submission"])
    with open(f"{name}.tmp", "w") as file:
        json.dump(record, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{name}.tmp", name)


def load(submission: str) -> Record:
    """The record of an id, or of its file's path."""
    name = submission if submission.endswith(".json") else path(submission)
    try:
        with open(name) as file:
            record: Record = json.load(file)
        if not isinstance(record, dict) or not record.keys() >= KEYS or record["provider"] not in get_args(Provider):
            raise ValueError(f"it lacks one of {', '.join(sorted(KEYS))}")
        if not all(isinstance(job, dict) and {"name", "handle"} <= job.keys() for job in record["jobs"]):
            raise ValueError("its jobs lack a name or a handle")
    except (OSError, ValueError, TypeError) as error:
        known = ", ".join(sorted(os.path.basename(each)[:-5] for each in glob.glob(path("*")))) or "none"
        raise UsageError(f"{submission}: not a submission of this folder ({error}); there are: {known}") from None
    return record


def find(wanted: str) -> Record | None:
    """The newest record of the same request."""
    records = []
    for each in glob.glob(path("*")):
        try:
            records.append(load(os.path.basename(each)[:-5]))
        except UsageError as error:
            print(f"notice: skipped {each}: {error}", file=sys.stderr)
    same = [record for record in records if record["request_hash"] == wanted]
    return max(same, key=lambda record: str(record["time"]), default=None)


@contextmanager
def locked() -> Iterator[None]:
    """One client at a time sends from this folder: two would both send what is missing."""
    os.makedirs(FOLDER, exist_ok=True)
    with open(f"{FOLDER}/.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another submit_exp is sending from this folder ({FOLDER}/.lock)") from None
        yield
