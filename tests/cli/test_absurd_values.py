"""Recipes with absurd values: one error that names the value, at once."""

import re

import pytest

from outrider.data.config import DataConfig
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
