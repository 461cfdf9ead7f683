"""Comparison of resumed and uninterrupted training runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.train.records import read_records

TIMING = frozenset({"seconds", "positions_per_second", "tokens_per_second"})
"""Fields of a record with times."""
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-3, 1e-2
"""Relative difference on a GPU of each loss, and of each tensor of weights as a whole. There, the
backward pass of attention and `index_add` have atomic additions, and Adam turns rounding errors of
gradients near zero into whole steps."""


def records(folder: Path) -> list[dict[str, Any]]:
    """Read the records of a run's folder without times."""
    lines = read_records(folder / "train" / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMING} for line in lines]


def assert_same_records(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], device: torch.device) -> None:
    """Check that records are equal, on a GPU up to rounding errors.

    On a GPU the counts of hits may differ after a near tie.
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
    """Check that files of weights are equal, on a GPU up to rounding errors."""
    if device.type == "cpu":
        assert ours.read_bytes() == theirs.read_bytes(), ours
        return
    expected = load_file(theirs)
    actual = load_file(ours)
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert (actual[name].float() - weight.float()).norm() <= WEIGHT_TOLERANCE * weight.float().norm(), name
