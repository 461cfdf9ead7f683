"""What a resumed training may differ in from an unbroken one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.train.tracking import read_records

TIMING = frozenset({"seconds", "positions_per_second", "tokens_per_second"})
"""Fields of a record that a clock decides."""
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-3, 1e-2
"""Relative, on a GPU: of each loss, and of each tensor of weights as a whole. The backward of attention and `index_add` add by
atomic operations there, and Adam makes whole steps of the rounding of a gradient near zero."""


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's folder, without the parts that a clock decides."""
    lines = read_records(folder / "train" / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMING} for line in lines]


def assert_same_records(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], device: torch.device) -> None:
    """Losses and all: equal, on a GPU within rounding.

    Counts of right guesses may differ by a near tie there.
    """
    if device.type == "cpu":
        assert ours == theirs
        return
    for name in ("step", "positions_seen", "tokens_seen"):
        assert [line.get(name) for line in ours] == [line.get(name) for line in theirs]
    for name in ("loss", "grad_norm", "learning_rate"):
        expected = [line[name] for line in theirs if name in line]
        assert [line[name] for line in ours if name in line] == pytest.approx(expected, rel=LOSS_TOLERANCE)


def assert_same_weights(ours: Path, theirs: Path, device: torch.device) -> None:
    """Files of weights: the same bytes, on a GPU the same weights within rounding."""
    if device.type == "cpu":
        assert ours.read_bytes() == theirs.read_bytes(), ours
        return
    expected = load_file(theirs)
    found = load_file(ours)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name].float() - weight.float()).norm() <= WEIGHT_TOLERANCE * weight.float().norm(), name
