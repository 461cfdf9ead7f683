"""Storage of the drafter with the most tokens per step in validation."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.models.drafters import build_drafter, load_drafter, parse_drafter
from outrider.models.drafters.base import TrainableDrafter
from outrider.models.llm.hf_target import HFTarget
from outrider.train import results as best_module
from outrider.train.results import Best

from .conftest import DRAFTER


@pytest.fixture
def drafter(target: HFTarget) -> TrainableDrafter:
    return build_drafter(parse_drafter(DRAFTER), target)


def measured(value: float | None) -> dict[str, Any]:
    return {"validation_tokens_per_step": value, "validation_loss": 1.0}


def add(best: Best, drafter: TrainableDrafter, step: int, value: float | None) -> int | None:
    """Measure a drafter whose weights are all `step`; return the step of the best one."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(step)
    best.add(step, measured(value))
    best.keep(drafter)
    record = best.record()
    return None if record is None else record.step


def weight_in(folder: Path) -> float:
    tensors = load_file(folder / "model.safetensors")
    return float(max(tensor.float().max() for tensor in tensors.values()))


def test_a_worse_drafter_never_replaces_the_best(drafter: TrainableDrafter, target: HFTarget, tmp_path: Path) -> None:
    best = Best(tmp_path, target.identity)
    kept = [add(best, drafter, step, value) for step, value in [(1, None), (2, 1.5), (3, 1.5), (4, 1.7), (5, 1.6), (6, None)]]
    assert kept == [None, 2, 3, 4, 4, 4]
    record = best.record()
    assert record is not None
    assert (record.step, record.tokens_per_step, record.validation) == (4, 1.7, measured(1.7))
    assert weight_in(tmp_path / "best") == 4
    load_drafter(tmp_path / "best", target)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert best.latest == (5, 1.6)


@pytest.mark.parametrize(("moment", "expected"), [("before the record", 1), ("between the renames", 2)])
def test_a_kill_leaves_the_old_or_the_new_one(drafter, target, tmp_path, moment, expected):
    best = Best(tmp_path, target.identity)
    add(best, drafter, 1, 1.5)
    if (pid := os.fork()) == 0:
        replace = os.replace
        if moment == "before the record":
            best_module.write_json = lambda *_: os._exit(9)
        else:
            os.replace = lambda old, new: os._exit(9) if Path(new).name == "best" else replace(old, new)
        try:
            add(best, drafter, 2, 1.8)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9, "the moment never came"
    resumed = Best(tmp_path, target.identity)
    record = resumed.record()
    assert record is not None
    assert record.step == expected
    assert weight_in(tmp_path / "best") == expected


@pytest.mark.parametrize(
    ("values", "patience", "peaked"),
    [
        ([], 1, False),
        ([1.5], 1, False),
        ([1.5, 1.6], 1, False),
        ([1.5, 1.6, 1.6], 1, True),
        ([1.5, 1.6, 1.55], 2, False),
        ([1.5, 1.6, 1.55, 1.59], 2, True),
        ([1.5, 1.6, 1.55, 1.61], 2, False),
        ([1.5, 1.4, 1.3, 1.2], None, False),
        ([1.5, None], 1, True),
    ],
)
def test_patience_counts_measurements_without_a_new_best(target, tmp_path, values, patience, peaked):
    best = Best(tmp_path, target.identity)
    for step, value in enumerate(values):
        best.add(step, measured(value))
    resumed = Best(tmp_path, target.identity)
    resumed.load_state_dict(best.state_dict())
    assert best.has_peaked(patience) == resumed.has_peaked(patience) == peaked
