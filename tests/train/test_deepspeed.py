"""DeepSpeed's ZeRO with two processes on a CPU, launched as a user launches them, against one process without it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.train.tracking import read_records

from ..conftest import REPOSITORY
from .conftest import DRAFTER, TRAIN, Run

SCRIPT = Path(__file__).parent / "launched_train.py"
# Micro batches of unequal label counts, gradients that are clipped, a learning rate that falls, texts measured by decoding.
CONFIG = {
    **TRAIN,
    "batch_size": 2,
    "gradient_accumulation": 2,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
    "validation_texts": 5,
    "validation_tokens": 8,
    "keep_checkpoints": 9,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "redrafter": DRAFTER,
    "medusa": {"kind": "medusa", "num_heads": 3},
    "eagle": {"kind": "eagle", "feature_noise": 0.0},
    "eagle3": {"kind": "eagle3"},
}
# Others begin with gradients of zero, whose rounding Adam scales up to whole steps.
SAME_WEIGHTS = ("redrafter", "medusa")
NUMBERS = ("loss", "grad_norm", "learning_rate", "validation_loss", "validation_tokens_per_step")


def launch(arguments: list[str], timeout_seconds: float = 240) -> str:
    """`accelerate launch` with these arguments, on whatever port is free."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *arguments]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False, cwd=REPOSITORY
    )
    assert result.returncode == 0, result.stderr[-8000:]
    return result.stdout


def numbers(folder: Path) -> list[dict[str, float]]:
    lines = read_records(folder / "train" / "metrics.jsonl")
    return [{name: line[name] for name in NUMBERS if name in line} for line in lines]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the trainings of one process lie, once they have been asked for."""
    return tmp_path_factory.mktemp("plain")


@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_with_zero_train_as_one_process_without(
    stage: int, tiny_target_dir: Path, shards_dir: Path, tmp_path: Path, run_train: Callable[..., Run]
) -> None:
    trainings: dict[str, Any] = {name: {"config": CONFIG, "drafter": drafter} for name, drafter in DRAFTERS.items()}
    trainings["resumed"] = {**trainings["medusa"], "from": "medusa", "at": 3}
    file = ["--config_file", "conf/launch/one_node_zero.yaml"]
    options = ["--zero_stage", str(stage), "--num_processes", "2", "--mixed_precision", "no"]
    launch([*file, *options, str(SCRIPT), str(tiny_target_dir), str(shards_dir), str(tmp_path), json.dumps(trainings)])
    for name, drafter in DRAFTERS.items():
        one = run_train(f"one-{name}", replace_drafter=drafter, **{**CONFIG, "batch_size": 8, "gradient_accumulation": 1})
        ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / name / "drafter", one.drafter_dir))
        assert ours.keys() == theirs.keys()
        for key in ours if name in SAME_WEIGHTS else ():
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5)
        pairs = list(zip(numbers(tmp_path / name), numbers(one.train_dir.parent), strict=True))
        assert len(pairs) == TRAIN["steps"] + 1
        for of_two, of_one in pairs:
            assert of_two == pytest.approx(of_one, rel=1e-4), name
        assert of_one["grad_norm"] > 0.5 if "grad_norm" in of_one else True
    assert numbers(tmp_path / "resumed")[-1] == numbers(tmp_path / "medusa")[-1]
