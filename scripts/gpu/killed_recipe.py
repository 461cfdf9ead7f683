"""Kills a recipe with SIGKILL during training, runs it again, and compares both runs.

    python scripts/gpu/killed_recipe.py --folder outputs/killed --kill-at 50 --output r.json -- \\
        python train.py conf=demo train.steps=200 train.checkpoint_every=20

With several steps between checkpoints (train.checkpoint_every), the steps between the last
checkpoint and the kill are computed twice. `largest_difference` is the largest relative difference
of their losses: 0 on a CPU, about 1e-3 on a GPU, whose sums have a different order each time. The
recipe must run in one process, without a launcher, because only that process is killed. On Linux
the recipe ends when this script ends, even by SIGKILL.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.02
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>: the signal that a process gets when its parent ends."""


def main() -> None:
    # 1. Run the recipe until the kill, then again to its end.
    args, command = parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    metrics, checkpoints = args.folder / "train" / "metrics.jsonl", args.folder / "train" / "checkpoints"
    started = time.perf_counter()
    was_killed = run_until(command, metrics, args.kill_at)
    killed_after, before = time.perf_counter() - started, losses(metrics)
    checkpoint = max((int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")), default=0)
    ending = ending_with_this_process()
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, preexec_fn=ending)
    after = losses(metrics)
    # 2. Compare the steps that both runs computed.
    twice = [step for step in before if step > checkpoint and step in after]
    report = {
        "was_killed": was_killed,
        "exit_status": done.returncode,
        "steps_before_the_kill": max(before, default=0),
        "checkpoint": checkpoint,
        "steps": max(after, default=0),
        "steps_computed_twice": len(twice),
        "largest_difference": max((abs(after[step] - before[step]) / abs(before[step]) for step in twice), default=None),
        "first_loss": after[min(after)] if after else None,
        "last_loss": after[max(after)] if after else None,
        "seconds_until_the_kill": killed_after,
        "seconds": time.perf_counter() - started,
    }
    args.output.write_text(json.dumps(report, indent=2))
    print(json.dumps(report))
    sys.exit(done.returncode)


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Parse our options, and the command after `--`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="the run's output_dir, which is removed first")
    parser.add_argument("--kill-at", type=int, required=True, help="training step at which the run is killed")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("command", nargs="+", help="the recipe's command; output_dir and train.log_every are added")
    args = parser.parse_args()
    return args, [*args.command, f"output_dir={args.folder}", "train.log_every=1"]


def run_until(command: list[str], metrics: Path, step: int) -> bool:
    """Run the command, and kill it when `step` is recorded. Return whether it was killed."""
    ending = ending_with_this_process()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=ending)  # noqa: PLW1509 - no threads here
    while process.poll() is None:
        if max(losses(metrics), default=0) >= step:
            process.kill()
            process.wait()
            return True
        time.sleep(POLL_SECONDS)
    return False


def ending_with_this_process() -> Callable[[], None]:
    """Return a function with which a child asks Linux to be killed when this process ends.

    It is for `preexec_fn`. The child's own children don't inherit the request. On other systems the
    function does nothing.
    """
    parent = os.getpid()

    def ask() -> None:
        if LIBC is not None:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # the parent ended before the request
                os._exit(1)

    return ask


def losses(metrics: Path) -> dict[int, float]:
    """Read the loss of each recorded step. A truncated last line is ignored."""
    loss_of_step = {}
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        loss_of_step[record["step"]] = record["loss"]
    return loss_of_step


if __name__ == "__main__":
    main()
