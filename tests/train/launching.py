"""Shared code of tests with several processes: training runs, launches, and results."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from outrider.train.records import read_records

from ..conftest import REPOSITORY
from .conftest import DRAFTER, TRAIN

STEPS = 4
# Micro-batches with unequal numbers of labels, clipped gradients, a falling learning rate, and
# validation by decoding.
CONFIG = {
    **TRAIN,
    "steps": STEPS,
    "batch_size": 2,
    "gradient_accumulation": 2,
    "max_grad_norm": 0.1,
    "weight_decay": 0.1,
    "validation_texts": 2,
    "validation_tokens": 8,
    "checkpoint_every": 2,
}
IN_ONE_PROCESS = {"batch_size": 8, "gradient_accumulation": 1}
"""Options with the same texts per step, for one process and one micro-batch."""
DRAFTERS: dict[str, dict[str, Any]] = {
    "redrafter": DRAFTER,
    "medusa": {"kind": "medusa", "num_heads": 3},
    "eagle": {"kind": "eagle", "feature_noise": 0.0},
    "eagle3": {"kind": "eagle3"},
}
NUMBERS = ("loss", "grad_norm", "learning_rate", "positions_seen", "validation_loss", "validation_tokens_per_step")


def launch(arguments: list[str], target_dir: Path, shards_dir: Path, output: Path, trainings: dict[str, Any]) -> None:
    """Run launched_train.py with `accelerate launch` and these arguments."""
    folders = map(str, (target_dir, shards_dir, output))
    launch_script([*arguments, "-m", "tests.train.launched_train", *folders, json.dumps(trainings)])


def launch_script(arguments: list[str]) -> None:
    """Run `accelerate launch` with these arguments, on a free port."""
    result = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=REPOSITORY,
    )
    assert result.returncode == 0, result.stderr[-8000:]


def numbers(folder: Path) -> list[dict[str, float]]:
    """Read the records without times."""
    lines = read_records(folder / "train" / "metrics.jsonl")
    return [{name: line[name] for name in NUMBERS if name in line} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "drafter" / "model.safetensors")
