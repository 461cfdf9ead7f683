"""Recipes with absurd values and structures: one error that names the value or file, at once."""

import re
import time
from pathlib import Path

import pytest

from outrider.cli.recipe_file import MAX_BYTES, MAX_VALUES, read_recipe_file
from outrider.data.config import DataConfig
from outrider.data.fields import MAX_COUNT, MAX_SMALL_COUNT, MAX_THREADS
from outrider.distill.config import DistillConfig
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.train.config import TrainConfig

from ..wrong_values import problems

REQUIRED = {TrainConfig: {"steps": 5}, EvalConfig: {"suites": [SuiteConfig(name="stdlib")]}, DataConfig: {"source": "stdlib"}}
LAUGHS = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
STRUCTURES = {
    "nested mappings": ("train: " + "{a: " * 3000 + "1" + "}" * 3000, "nested too deeply"),
    "nested lists": ("train: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    "nested blocks": ("\n".join(" " * depth + "a:" for depth in range(1200)), "nested too deeply"),
    "laughs": (LAUGHS, f"more than {MAX_VALUES} values"),
    "circle": ("train: &a {b: *a}", "nested too deeply"),
    "circle of lists": ("eval: {suites: &a [*a]}", "nested too deeply"),
    "many": ("train: {" + ",".join(f"k{number}: 1" for number in range(MAX_VALUES)) + "}", f"more than {MAX_VALUES} values"),
    "large": ("name: " + "x" * MAX_BYTES, f"a recipe at most {MAX_BYTES}"),
    "unclosed": ("name: " + "${" * 500, "unclosed"),
}


@pytest.mark.parametrize(("text", "message"), STRUCTURES.values(), ids=STRUCTURES)
def test_a_recipe_without_an_end_is_an_error_that_names_its_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    start = time.monotonic()
    with pytest.raises(ValueError, match=rf"a.yaml .*{message}"):
        read_recipe_file(tmp_path / "a.yaml")
    assert time.monotonic() - start < 10


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
        (TrainConfig, "num_threads", MAX_THREADS),
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
