"""Behaves like a training script, without training: python fake_training.py --help

It prints the scripts' progress lines, writes an event file, stops at SIGTERM with a checkpoint and goes on from it.
The return at a step is `quality` * step / total + the number of letters of the game.
"""

import argparse
import json
import os
import signal
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--env-id", required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--exp-name", default="fake_training")
parser.add_argument("--run-name", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--total-timesteps", type=int, default=1000)
parser.add_argument("--quality", type=float, default=1.0)
parser.add_argument("--anneal-lr", action=argparse.BooleanOptionalAction)
parser.add_argument("--optimizer", default="adam")
parser.add_argument("--pause", type=float, default=0.0, help="seconds of each of the 20 iterations")
parser.add_argument("--fail-seed", type=int, help="the seed that fails in its middle")
parser.add_argument("--fail-optimizer", help="the optimizer that fails in its middle")
parser.add_argument("--hang-seed", type=int, help="the seed that stays in its middle until a file `go` is there")
parser.add_argument("--hang-below", type=float, default=-1e9, help="likewise, of a quality below this")
parser.add_argument("--events", action="store_true", help="write an event file")
args = parser.parse_args()

stops = []
signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
folder = f"runs/{args.run_name}"
os.makedirs(folder, exist_ok=True)
state = {"iteration": 0}
if os.path.exists(f"{folder}/checkpoint.json"):
    with open(f"{folder}/checkpoint.json") as file:
        state = json.load(file)
    print(f"from iteration {state['iteration']}", file=sys.stderr)

writer = None
if args.events:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(folder)

print(f"cores {sorted(os.sched_getaffinity(0))} gpus {os.environ.get('CUDA_VISIBLE_DEVICES')}", file=sys.stderr)
for iteration in range(state["iteration"] + 1, 21):
    time.sleep(args.pause)
    step = args.total_timesteps * iteration // 20
    score = args.quality * step / args.total_timesteps + len(args.env_id)
    if iteration == 10 and (args.seed == args.fail_seed or args.optimizer == args.fail_optimizer):
        print("the loss is not finite", file=sys.stderr)
        sys.exit(1)
    print(
        f"step {step}/{args.total_timesteps}  SPS 100  left 0:00:{20 - iteration:02}  mean return {score:.1f}",
        file=sys.stderr,
    )
    if writer:
        for tag, value in (("charts/episodic_return", score), ("charts/SPS", 100.0)):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        writer.flush()
    hangs = iteration == 10 and (args.seed == args.hang_seed or args.quality < args.hang_below)
    while hangs and not os.path.exists("go") and not stops:
        time.sleep(0.05)
    if stops or iteration == 20:
        with open(f"{folder}/checkpoint.json", "w") as file:
            json.dump({"iteration": iteration}, file)
    if stops and iteration < 20:
        print(f"stopped after iteration {iteration}", file=sys.stderr)
        sys.exit(75)
with open("finished.txt", "a") as file:
    file.write(f"{args.run_name}\n")
