"""The study of adaptation: its texts, the options of its runs, and its figures."""

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from outrider.cli.config import register, to_run_config
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.llm.hf_target import HFTarget

from .conftest import Run

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "adapt_study.py"


@pytest.fixture(scope="module")
def study() -> Any:
    spec = importlib.util.spec_from_file_location("adapt_study", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_texts_of_the_target_and_of_drafters_are_disjoint(study: Any, tmp_path: Path) -> None:
    folders = study.split_headers(tmp_path)
    names = [{path.relative_to(folder) for path in folder.rglob("*.h")} for folder in folders.values()]
    assert min(map(len, names)) > 100
    assert not names[0] & names[1]


def test_the_training_runs_differ_only_in_start_and_schedule(study: Any, target: HFTarget, tmp_path: Path) -> None:
    form = {"kind": "redrafter", "exit_width": 16, "initial_state": "zero"}
    drafter = tmp_path / "a drafter's folder"
    save_drafter(build_drafter(parse_drafter(form), target), drafter, target.identity)
    arms = study.recipes(Namespace(steps=120, validate_every=30), drafter)
    variants = study.as_override({study.folder_name(name, 0): arm for name, arm in arms.items()})
    register()
    with initialize_config_module("outrider.conf", version_base="1.3"):
        composed = compose(
            "config",
            overrides=[
                "conf=demo",
                "drafter={exit_width: 16, head_init: random}",
                "train.validation_texts=1",
                f"+variants={variants}",
            ],
        )
    warm, steep, short, cold = to_run_config(composed).drafter_runs()
    assert warm.drafter.start_from == steep.drafter.start_from == drafter
    assert steep.train == short.train
    assert (warm.train.steps, short.train.steps, cold.train.steps) == (100, 100, 120)
    assert warm.train.learning_rate < short.train.learning_rate == cold.train.learning_rate
    assert warm.drafter.config == cold.drafter.config


def test_steps_to_the_level_are_those_of_its_first_measurement(
    study: Any, run_train: Callable[..., Run], tmp_path: Path
) -> None:
    options = {"validation_texts": 4, "validation_tokens": 8, "log_every": 1}
    start = run_train("start", steps=40)
    run_train("variants/warm_0", replace_drafter={"start_from": str(start.drafter_dir)}, validate_every=1, **options)
    run_train("variants/warm_full_rate_0", replace_drafter={"start_from": str(start.drafter_dir)}, validate_every=3, **options)
    run_train("variants/cold_as_short_0", validate_every=3, **options)
    run_train("variants/cold_0", steps=12, validate_every=4, **options)
    figures = study.figures_of(tmp_path, 0, ["warm", "warm, full rate", "cold, as short", "cold"])
    assert [point["step"] for point in figures["curves"]["cold"]] == [4, 8, 12]
    assert figures["level"] == figures["curves"]["cold"][-1]["tokens_per_step"]
    warm = figures["curves"]["warm"]
    first = next(point for point in warm if point["tokens_per_step"] >= figures["level"])
    assert figures["reached"]["warm"]["1"] == first
    assert all(point["text_tokens"] > 0 for point in warm)
    assert [point["positions"] for point in warm] == sorted({point["positions"] for point in warm})
    figures[study.UNADAPTED] = 1.25
    row = next(line for line in study.table([figures]).splitlines() if line.startswith("| warm | 0 | 1.25 | "))
    assert f"| {first['step']} ({first['text_tokens'] / 1000:.0f}k) | {warm[-1]['tokens_per_step']:.2f} after 6 |" in row
    study.plot({"figures": [figures], "options": {"positions": 8}}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
