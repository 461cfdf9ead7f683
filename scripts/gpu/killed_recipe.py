"""Runs a recipe, kills it with SIGKILL in its training, runs the same command again, and compares
what both computed.

    python scripts/gpu/killed_recipe.py --folder outputs/killed --kill-at 50 --output recipe.json -- \\
        python train.py conf=demo train.steps=200 train.checkpoint_every=20

With several steps from one checkpoint to the next (train.checkpoint_every), those between the last
checkpoint and the kill are computed twice. `largest_difference` is that of their losses, relative:
0 on a CPU, some 1e-3 on a GPU, whose sums come in another order each time. The recipe must run in
one process, without a launcher: that process is what is killed. On Linux the recipe ends when this
script ends, also by SIGKILL.
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
    """Our options, and behind `--` the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="the run's output_dir; what is there is removed")
    parser.add_argument("--kill-at", type=int, required=True, help="training step at which the run is killed")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("command", nargs="+", help="the recipe's; output_dir and train.log_every are added")
    args = parser.parse_args()
    return args, [*args.command, f"output_dir={args.folder}", "train.log_every=1"]


def run_until(command: list[str], metrics: Path, step: int) -> bool:
    """Run the command and kill it when `step` is recorded. Whether that came before its end."""
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
    """Make the function with which a child asks Linux to be killed when this process ends, however
    it ends.

    For `preexec_fn`. The child's own children do not inherit the request. On other systems the
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
    """Return the loss of each recorded step. A half-written last line counts as none."""
    found = {}
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        found[record["step"]] = record["loss"]
    return found


if __name__ == "__main__":
    main()
