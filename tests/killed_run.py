"""Runs a training script until something happens to it: python killed_run.py SCRIPT WHAT RANK COUNT [FLAGS ...]

In the process of rank RANK, at its COUNT-th step of the environments (WHAT: worker, torchrun, term) or just before its
COUNT-th checkpoint gets its name (rename):

    worker      this process is killed
    torchrun    torchrun is killed
    term        torchrun gets SIGTERM
    rename      this process is killed
    nothing     the run goes to its end
"""

import os
import signal
import sys

from recorded_run import load


def main():
    path, what, rank, count, *flags = sys.argv[1:]
    sys.argv = [path, *flags]
    script = load(path)
    if os.environ.get("RANK", "0") == rank:
        watch(script, what, int(count))
    script.process.run(script.main, script.Args, path)


def watch(script, what, count):
    seen = {"steps": 0, "names": 0}
    make_vector, replace = script.make_vector, os.replace

    def watched_vector(*args, **kwargs):
        envs = make_vector(*args, **kwargs)
        step = envs.step

        def watched_step(action):
            seen["steps"] += 1
            if seen["steps"] == count:
                if what == "worker":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "torchrun":
                    os.kill(os.getppid(), signal.SIGKILL)
                if what == "term":
                    os.kill(os.getppid(), signal.SIGTERM)
            return step(action)

        envs.step = watched_step
        return envs

    def watched_replace(*args):
        seen["names"] += 1
        if what == "rename" and seen["names"] == count:
            assert os.path.getsize(args[0]) > 1_000_000 and not os.path.exists(args[1])
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*args)

    script.make_vector, os.replace = watched_vector, watched_replace


if __name__ == "__main__":
    main()
