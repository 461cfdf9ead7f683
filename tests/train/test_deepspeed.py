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
    "steps": 4,
    "batch_size": 2,
    "gradient_accumulation": 2,
    "max_grad_norm": 0.1,
    "weight_decay": 0.1,
    "validation_texts": 2,
    "validation_tokens": 8,
    "checkpoint_every": 2,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "redrafter": DRAFTER,
    "medusa": {"kind": "medusa", "num_heads": 3},
    "eagle": {"kind": "eagle", "feature_noise": 0.0},
    "eagle3": {"kind": "eagle3"},
}
TRAININGS = [("zero1", "redrafter"), *(("zero2", kind) for kind in DRAFTERS), *(("zero3", kind) for kind in DRAFTERS)]
NUMBERS = ("loss", "grad_norm", "learning_rate", "positions_seen", "validation_loss", "validation_tokens_per_step")
TOLERANCE = 1e-4
"""Relative, of losses in float32: sums over two processes and over one are rounded differently, and Adam's steps by each
gradient's size carry that on."""


def launch(arguments: list[str], timeout_seconds: float = 300) -> None:
    """`accelerate launch` with these arguments, on whatever port is free."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *arguments]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False, cwd=REPOSITORY
    )
    assert result.returncode == 0, result.stderr[-8000:]


def numbers(folder: Path) -> list[dict[str, float]]:
    lines = read_records(folder / "train" / "metrics.jsonl")
    return [{name: line[name] for name in NUMBERS if name in line} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "drafter" / "model.safetensors")


@pytest.fixture(scope="module")
def launched(tiny_target_dir: Path, shards_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trainings of two processes with DeepSpeed, in a folder each. In one launch, since most of its time is imports'."""
    output = tmp_path_factory.mktemp("deepspeed")
    trainings: dict[str, Any] = {
        f"{zero}-{kind}": {"zero_stage": int(zero[-1]), "config": CONFIG, "drafter": DRAFTERS[kind]} for zero, kind in TRAININGS
    }
    for zero in ("zero2", "zero3"):
        trainings[f"{zero}-resumed"] = {**trainings[f"{zero}-medusa"], "from": f"{zero}-medusa", "at": 2}
        trainings[f"{zero}-bf16"] = {**trainings[f"{zero}-redrafter"], "mixed_precision": "bf16"}
    file = ["--config_file", "conf/launch/one_node_zero.yaml"]
    options = ["--zero_stage", "2", "--num_processes", "2", "--mixed_precision", "no"]
    launch([*file, *options, str(SCRIPT), str(tiny_target_dir), str(shards_dir), str(output), json.dumps(trainings)])
    return output


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, Run]:
    """Trainings that were made already, by kind."""
    return {}


@pytest.fixture
def in_one_process(run_train: Callable[..., Run], of_one_process: dict[str, Run]) -> Callable[[str], Path]:
    """Trains a kind as one process does, on as many texts a step in a single micro batch; once."""

    def train(kind: str) -> Path:
        if kind not in of_one_process:
            config = {**CONFIG, "batch_size": 8, "gradient_accumulation": 1}
            of_one_process[kind] = run_train(kind, replace_drafter=DRAFTERS[kind], **config)
        return of_one_process[kind].train_dir.parent

    return train


@pytest.mark.parametrize(("zero", "kind"), TRAININGS)
def test_two_processes_with_zero_learn_what_one_without_does(
    zero: str, kind: str, launched: Path, in_one_process: Callable[[str], Path]
) -> None:
    one, two = in_one_process(kind), launched / f"{zero}-{kind}"
    pairs = list(zip(numbers(two), numbers(one), strict=True))
    assert len(pairs) == CONFIG["steps"] + 1
    for of_two, of_one in pairs:
        assert of_two == pytest.approx(of_one, rel=TOLERANCE)
    assert max(of_one.get("grad_norm", 0) for _, of_one in pairs) > 2 * CONFIG["max_grad_norm"], "nothing was clipped"
    ours, theirs = weights(two), weights(one)
    assert len(ours) >= 4
    assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in theirs.items()}
    for name in ours:
        assert ours[name].shape == theirs[name].shape
        # Where a gradient begins at zero (EAGLE's), Adam scales its rounding up to whole steps.
        if kind in ("redrafter", "medusa"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=TOLERANCE, atol=1e-5)


@pytest.mark.parametrize("zero", ["zero2", "zero3"])
def test_a_resumed_run_with_zero_ends_with_the_bits_of_an_unbroken_one(zero: str, launched: Path) -> None:
    resumed, unbroken = launched / f"{zero}-resumed", launched / f"{zero}-medusa"
    assert len(numbers(resumed)) == CONFIG["steps"] - 2 + 1
    assert numbers(resumed) == numbers(unbroken)[2:]
    ours, theirs = weights(resumed), weights(unbroken)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("zero", ["zero2", "zero3"])
def test_zero_in_16_bits_keeps_and_saves_weights_in_32(zero: str, launched: Path) -> None:
    of_bf16, of_float32 = numbers(launched / f"{zero}-bf16"), numbers(launched / f"{zero}-redrafter")
    assert [line.get("loss") for line in of_bf16[:-1]] == pytest.approx(
        [line.get("loss") for line in of_float32[:-1]], rel=0.02
    )
    assert of_bf16 != of_float32
    saved = weights(launched / f"{zero}-bf16")
    assert all(value.dtype == torch.float32 for value in saved.values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values()), "rounded to 16 bits"
