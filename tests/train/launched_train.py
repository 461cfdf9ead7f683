"""Trainings of test_processes.py and test_deepspeed.py, in launched processes.

python -m tests.train.launched_train TARGET SHARDS OUTPUT 'JSON of the trainings, by name: {"config":
TrainConfig, "drafter": {...}}'

A training run with "from" resumes from that run's checkpoint of step "at", as after a kill.
"zero_stage" and "mixed_precision" replace the launcher's values, and "shards" replaces SHARDS.
"tensor_parallel" slices the target. From a run with "fsdp" on, all runs use FSDP2.
"""

import gc
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from outrider.models.drafters import parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target
from outrider.train.config import TrainConfig
from outrider.train.processes import make_accelerator
from outrider.train.run import train

from .forked import with_fsdp2


def relaunched(training: dict[str, Any]) -> Accelerator:
    """Make an accelerator with other launch options in these processes."""
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(training.get("zero_stage", 2))
    return make_accelerator(training.get("mixed_precision"))


def main(target_dir: Path, shards_dir: Path, output_dir: Path, trainings: dict[str, Any]) -> None:
    accelerator, way = make_accelerator(), None
    targets = {False: load_target(TargetConfig(name_or_path=str(target_dir), dtype="float32"), torch.device("cpu"))}
    gc.freeze()  # every training collects garbage, and would walk the objects of imports
    for name, training in trainings.items():
        folder = output_dir / name
        before, way = way, (training.get("zero_stage"), training.get("mixed_precision"))
        if "zero_stage" in training and way != before:
            accelerator = relaunched(training)
        if training.get("fsdp"):
            accelerator = with_fsdp2(accelerator)
        if "from" in training and accelerator.is_main_process:
            step = f"step-{training['at']:08d}"
            shutil.copytree(output_dir / training["from"] / "train/checkpoints" / step, folder / "train/checkpoints" / step)
        accelerator.wait_for_everyone()
        config = TrainConfig(**training["config"])
        shards = Path(training.get("shards", shards_dir))
        in_slices = training.get("tensor_parallel", False)
        if in_slices not in targets:
            targets[in_slices] = load_target(TargetConfig(name_or_path=str(target_dir), dtype="float32", tensor_parallel=True))
        train(
            config,
            parse_drafter(training["drafter"]),
            targets[in_slices],
            shards,
            folder / "train",
            folder / "drafter",
            accelerator,
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), json.loads(sys.argv[4]))
