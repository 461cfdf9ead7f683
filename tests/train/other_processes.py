"""Processes of test_resume.py: SIGTERM to two, and resuming with one."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from outrider.models.drafters import parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target
from outrider.train import checkpoint as checkpoint_module
from outrider.train.config import TrainConfig
from outrider.train.run import train

from .forked import ends, fork

WRITE_SECONDS = 0.5


def main(target_dir: Path, shards: Path, output: Path, for_two: Any, for_one: Any, drafter: Any) -> tuple[list[int], list[str]]:
    """Return the exit codes of the two processes, which get SIGTERM while a checkpoint is written, and their checkpoints."""
    target = load_target(TargetConfig(name_or_path=str(target_dir), dtype="float32"), torch.device("cpu"))
    folders, spec = (output / "train", output / "drafter"), parse_drafter(drafter)
    save = torch.save

    def save_slowly(value: Any, file: Any, **options: Any) -> None:
        if isinstance(file, Path):  # only for files, not for objects sent between processes
            time.sleep(WRITE_SECONDS)
        save(value, file, **options)

    def train_slowly() -> None:
        checkpoint_module.torch.save = save_slowly
        train(TrainConfig(**for_two), spec, target, shards, *folders, Accelerator())

    pids = fork(2, train_slowly)
    checkpoints = output / "train" / "checkpoints"
    deadline = time.perf_counter() + 60
    while not (checkpoints / ".step-00000002.outrider-partial").exists():
        assert time.perf_counter() < deadline, "the training doesn't begin"
        time.sleep(0.001)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    # Like launchers: when one process has ended, send the signal to the others again.
    first, status = os.wait()
    (second,) = set(pids) - {first}
    os.kill(second, signal.SIGTERM)
    codes = [os.waitstatus_to_exitcode(status), *ends([second])]
    left = sorted(path.name for path in checkpoints.iterdir())
    one = fork(1, lambda: train(TrainConfig(**for_one), spec, target, shards, *folders, Accelerator(cpu=True)))
    assert ends(one) == [0]
    return codes, left
