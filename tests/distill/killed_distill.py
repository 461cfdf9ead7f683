"""Answers that test_faults.py regenerates and labels with processes that are killed repeatedly."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from outrider.data.config import DataConfig
from outrider.data.manifest import Manifest
from outrider.distill.config import DistillConfig
from outrider.distill.label.run import distill
from outrider.distill.regenerate.run import regenerate
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ..train.forked import fork

CONFIG = DistillConfig(
    engine="decoder", max_new_tokens=12, horizon=4, features="last_hidden", shard_examples=3, batch_tokens=128
)
LONGEST_SECONDS = 120.0


def make(target: HFTarget, data: DataConfig, folder: Path, accelerator: Accelerator) -> Manifest:
    """Run both parts of the stage as the pipeline does."""
    examples = regenerate(CONFIG, data, target, folder / "answers", accelerator)
    return distill(CONFIG, data, target, folder / "distill", accelerator, examples=examples)


def attempt(num_processes: int, target: HFTarget, data: DataConfig, folder: Path) -> list[int]:
    """Fork processes that distil; return their ids."""

    def work() -> None:
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == num_processes
        make(target, data, folder, accelerator)

    return fork(num_processes, work)


def wait(children: list[int]) -> list[int]:
    """Wait until all processes have ended; return their exit codes."""
    deadline, codes = time.monotonic() + LONGEST_SECONDS, {}
    while len(codes) < len(children):
        for child in children:
            ended, status = os.waitpid(child, os.WNOHANG) if child not in codes else (0, 0)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        assert time.monotonic() < deadline, "a process hangs"
        time.sleep(0.002)
    return list(codes.values())


def finished(folder: Path) -> dict[str, int]:
    """Map the finished shards to the times at which they were written."""
    patterns = ("answers/answers-*[0-9].json", "distill/shard-*[0-9].json")
    return {path.name: path.stat().st_mtime_ns for pattern in patterns for path in folder.glob(pattern)}


def main(target_dir: Path, data: DataConfig, folder: Path, num_shards: int, num_kills: int, seed: int) -> list[dict[str, Any]]:
    """Return `num_kills` attempts, half of them in each half of the first `num_shards` shards.

    Every attempt has one to three processes. One of them, or all, get SIGKILL at a random moment; then the others are
    killed too, as a launcher does.
    """
    target = load_target(TargetConfig(name_or_path=str(target_dir), device="cpu"))
    rng, attempts, half = random.Random(seed), list[dict[str, Any]](), num_shards // 2
    moments = [moment for first in (1, 1 + half) for moment in rng.sample(range(first, first + half), num_kills // 2)]
    for index, enough in enumerate(sorted(moments)):
        before, num_processes = finished(folder), (2, 1, 3)[index % 3]
        children = attempt(num_processes, target, data, folder)
        # The previous attempt wrote enough shards before it died, so kill this one at its start.
        if len(before) >= enough:
            time.sleep(rng.uniform(0, 0.3))
        deadline = time.monotonic() + LONGEST_SECONDS
        while len(finished(folder)) < enough:
            assert time.monotonic() < deadline, "an attempt makes no shard"
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.01))
        victims = rng.sample(children, rng.choice([1, len(children)]))
        for child in [*victims, *(child for child in children if child not in victims)]:
            os.kill(child, signal.SIGKILL)
            time.sleep(rng.uniform(0, 0.02))
        killed = -signal.SIGKILL in wait(children)  # false if all had ended before the signal
        after = finished(folder)
        kept = all(after.get(name) == moment for name, moment in before.items())
        attempts.append({"num_processes": num_processes, "num_finished": len(after), "killed": killed, "kept": kept})
    assert wait(attempt(2, target, data, folder)) == [0, 0]
    return attempts
