"""Whether a training script takes the flags that its jobs would give it, asked before any of them is sent."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cleanrl_utils.config import UsageError, parse
from cleanrl_utils.evaluate import import_script, is_training_script
from cleanrl_utils.runs import PROBE_LIMIT
from cleanrl_utils.submit.spec import JobSpec

REFUSED, NOT_ASKED = 64, 65


def check(specs: Sequence[JobSpec]) -> None:
    """Usage error where the script in this folder refuses a job's flags; a script that only the image has is not asked.

    Another process imports it, which is slow, and may print or fail: a laptop need not have what the image has.
    """
    path = next(word for word in specs[0].argv if word.endswith(".py"))
    if not is_training_script(Path(path)):
        return
    games = {spec.env_id: spec.argv[spec.argv.index(path) + 1 :] for spec in specs}  # nothing but numbers differs else
    line = [sys.executable, "-m", __name__, path, json.dumps(list(games.values()))]
    try:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=PROBE_LIMIT
        )
        code, said = done.returncode, done.stderr.strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        code, said = NOT_ASKED, f"importing it takes more than {PROBE_LIMIT:.0f} s"
    if code == REFUSED:
        raise UsageError(f"--command: {path}, as it is here, refuses it: {said}")
    if code:
        print(f"notice: the flags of {path} were not checked: {said}", file=sys.stderr)


def ask(path: str, jobs: Sequence[Sequence[str]]) -> int:
    """Say on stderr what the script has against the flags of a job."""
    try:
        module = import_script(Path(path))
        if not hasattr(module, "Args"):
            raise UsageError("it defines no Args")
    except UsageError as error:
        print(str(error).removeprefix(f"--script {path}: "), file=sys.stderr)
        return NOT_ASKED
    try:
        for flags in jobs:
            args = parse(module.Args, list(flags))
            if hasattr(module, "check_game"):
                module.check_game(args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], json.loads(sys.argv[2])))
