"""Recipes with absurd values: one error that names the value, at once."""

import re

import pytest

from outrider.data.config import DataConfig
from outrider.data.fields import MAX_COUNT, MAX_SMALL_COUNT, MAX_THREADS
from outrider.distill.config import DistillConfig
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.train.config import TrainConfig

from ..wrong_values import problems

REQUIRED = {TrainConfig: {"steps": 5}, EvalConfig: {"suites": [SuiteConfig(name="stdlib")]}, DataConfig: {"source": "stdlib"}}


@pytest.mark.parametrize("config_class", [TrainConfig, DistillConfig, EvalConfig, DataConfig])
def test_every_whole_number_of_a_recipe_has_an_upper_bound(config_class: type) -> None:
    required, num_visited = REQUIRED.get(config_class, {}), 0
    for name, field in config_class.__dataclass_fields__.items():
        if not re.search(r"<class 'int'>|\bint\b", str(field.type)) or "list" in str(field.type):
            continue
        for value in (2**63, 10**12):
            lines = problems(config_class, **required | {name: value})
            assert any(line.startswith(f"{name}={value}: must be ") for line in lines), name
        num_visited += 1
    assert num_visited >= 4


@pytest.mark.parametrize(
    ("config_class", "name", "most"),
    [
        (TrainConfig, "batch_size", MAX_SMALL_COUNT),
        (EvalConfig, "num_threads", MAX_THREADS),
        (EvalConfig, "repeats", MAX_SMALL_COUNT),
        (DistillConfig, "horizon", MAX_SMALL_COUNT),
        (TrainConfig, "steps", MAX_COUNT - 1),
    ],
)
def test_what_would_hang_or_crash_is_above_its_bound(config_class: type, name: str, most: int) -> None:
    """A million threads end the process by a segmentation fault, and a batch of 10^12 never fills."""
    required = REQUIRED.get(config_class, {})
    config_class(**required | {name: most})
    (problem,) = problems(config_class, **required | {name: most + 1})
    assert problem.startswith(f"{name}={most + 1}: must be ")
