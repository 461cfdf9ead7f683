"""Script of test_resume.py that repeatedly kills and resumes training at random moments.

python random_kills.py TARGET SHARDS OUTPUT 'JSON of TrainConfig' 'JSON of the drafter' PROCESSES
KILLS [SEED]

An uninterrupted run goes to OUTPUT/unbroken, and killed and resumed runs go to OUTPUT/kill-NUMBER.
OUTPUT/report.json has, for each kill, the seconds after the file of records appeared, the step of
the last complete checkpoint, and whether another checkpoint was incomplete. Processes are forked
from one with all slow imports. They are killed with SIGKILL within milliseconds of each other, in
random order.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from accelerate import Accelerator
from forked import DropoutDrafter, ends, fork

from outrider.models.drafters import DRAFTERS, parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target
from outrider.train.checkpoint import latest_checkpoint
from outrider.train.config import TrainConfig
from outrider.train.run import train

TARGET, SHARDS, OUTPUT = map(Path, sys.argv[1:4])
CONFIG, DRAFTER = TrainConfig(**json.loads(sys.argv[4])), json.loads(sys.argv[5])
PROCESSES, KILLS = int(sys.argv[6]), int(sys.argv[7])
RANDOM = Random(int(sys.argv[8]) if len(sys.argv) > 8 else None)
GAP_SECONDS = 0.02
"""Maximum time between the kills of two processes of one run."""


def start(name: str, target: Any) -> list[int]:
    folder = OUTPUT / name
    return fork(
        PROCESSES,
        lambda: train(
            CONFIG,
            parse_drafter(DRAFTER),
            target,
            SHARDS,
            folder / "train",
            folder / "drafter",
            Accelerator(cpu=PROCESSES == 1),
        ),
    )


def begun(name: str) -> float:
    """Wait until training writes records; return the time."""
    deadline = time.perf_counter() + 60
    while not (OUTPUT / name / "train" / "metrics.jsonl").exists():
        assert time.perf_counter() < deadline, f"{name} doesn't begin"
        time.sleep(0.001)
    return time.perf_counter()


def main() -> None:
    torch.set_num_threads(1)  # a fork would lose a pool of threads
    DRAFTERS["dropout"] = DropoutDrafter
    target = load_target(TargetConfig(name_or_path=str(TARGET), dtype="float32"), torch.device("cpu"))
    gc.freeze()  # garbage collection in children skips the objects of imports
    pids = start("unbroken", target)
    started = begun("unbroken")
    assert ends(pids) == [0] * PROCESSES
    seconds = time.perf_counter() - started
    kills: list[dict[str, Any]] = []
    trials = 0
    while len(kills) < KILLS:
        trials += 1
        assert trials <= 5 * KILLS, "trainings end before they are killed"
        name = f"kill-{len(kills)}"
        pids = start(name, target)
        started, delay = begun(name), RANDOM.uniform(0, seconds)
        time.sleep(delay)
        for pid in RANDOM.sample(pids, len(pids)):
            os.kill(pid, signal.SIGKILL)
            time.sleep(RANDOM.uniform(0, GAP_SECONDS))
        if -signal.SIGKILL not in ends(pids):
            (OUTPUT / name).rename(OUTPUT / f"too-late-{trials}")
            seconds = delay  # the run without kills was slower: other work, first use
            continue
        checkpoints = OUTPUT / name / "train" / "checkpoints"
        last = latest_checkpoint(checkpoints)
        kills.append(
            {
                "after_seconds": delay,
                "checkpoint": int(last.name.removeprefix("step-")) if last else 0,
                "half_written": bool(list(checkpoints.glob(".*.outrider-partial"))),
            }
        )
        assert ends(start(name, target)) == [0] * PROCESSES, name
    report = {"processes": PROCESSES, "seconds": seconds, "kills": kills}
    (OUTPUT / "report.json").write_text(json.dumps(report, indent=1))


main()
