"""The pipeline bench in virtual time, in small: record, tables, marks, plots, a resume, bad input."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_pipeline")


@pytest.fixture
def marks(bench: Any) -> Any:
    return importlib.import_module("pipeline_marks")


@pytest.fixture
def run(bench: Any, tmp_path: Path) -> Callable[..., Path]:
    def call(*changes: str) -> Path:
        names = ["acceptance 0.8", "stages 2", "hop 1 ms", "ablation 0.8"]
        options = ["--parts", "virtual", "--texts", "2", "--new-tokens", "24", "--workers", "1", "--only", *names]
        bench.run(bench.parse_args([*options, "--output", str(tmp_path / "bench"), *changes]))
        return tmp_path / "bench"

    return call


def test_the_bench_runs_to_the_end_and_resumes(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    output = run()
    record = json.loads((output / "pipeline.json").read_text())
    cells = {cell["name"]: cell for cell in record["cells"] if cell["part"] == "virtual"}
    assert set(cells) == {"acceptance 0.8", "stages 2", "stages 24", "hop 1 ms", "ablation 0.8"}
    rows = cells["acceptance 0.8"]["rows"]
    assert rows["plain"]["tokens_per_second"] < rows["synchronous 4"]["tokens_per_second"]
    assert rows["pipelined"]["clock"] == "virtual time"
    table = (output / "table.md").read_text()
    assert "virtual time, acceptance 0.8: at least 3x of plain" in table
    assert max(len(line) for line in table.split("- Mark")[0].splitlines()) <= 80
    assert all((output / name).stat().st_size > 1000 for name in ("sweeps.png", "gantt.png"))
    # A resume decodes what is missing only, and gives the same record.
    capsys.readouterr()
    (output / "cells" / "virtual" / "stages_2.json").unlink()
    run()
    assert "virtual: 5 cells, 4 of them done" in capsys.readouterr().out
    again = json.loads((output / "pipeline.json").read_text())
    for first, second in zip(record["cells"], again["cells"], strict=True):
        for name, row in first["rows"].items():
            assert row["tokens_per_second"] == second["rows"][name]["tokens_per_second"], (first["name"], name)
    # Other sizes are other cells.
    run("--new-tokens", "16", "--plan")
    assert "virtual: 5 cells, 0 of them done" in capsys.readouterr().out


def test_wrong_numbers_are_refused(run: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="--texts is 0"):
        run("--texts", "0")


def row(speed: float, clock: str = "virtual time", **figures: Any) -> dict[str, Any]:
    return {"clock": clock, "tokens_per_second": speed, "text_seconds": [1 / speed] * 2, "first_seconds": 0.1, **figures}


def rows(plain: float, fixed: float, best: float, ours: float, clock: str = "virtual time") -> dict[str, Any]:
    return {
        "plain": row(plain, clock),
        "synchronous 4": row(fixed, clock, num_drafts=4),
        "synchronous 2": row(best, clock, num_drafts=2),
        "pipelined": row(ours, clock),
    }


def test_a_mark_is_judged_by_its_own_baseline(marks: Any) -> None:
    reached = {mark["rule"]: mark["reached"] for mark in marks.speed_marks({"acceptance 0.8": rows(1, 2, 2.4, 3.2)})}
    assert reached == {
        "virtual time, acceptance 0.8: at least 1.5x of K = 4": True,
        "virtual time, acceptance 0.8: at least 1.5x of the best K": False,
        "virtual time, acceptance 0.8: at least 3x of plain": True,
        "virtual time: first token at most 1.05x of plain's": True,
    }


def test_a_table_of_two_clocks_is_refused(marks: Any) -> None:
    cells = {"acceptance 0.8": rows(1, 2, 2, 3), "acceptance 0.5": rows(1, 2, 2, 3, clock="emulated stages, wall clock")}
    with pytest.raises(ValueError, match="2 clocks"):
        marks.speed_marks(cells)


def test_points_far_from_the_simulator_fail_the_mark(marks: Any) -> None:
    point = {"condition": "acceptance 0.8", "method": "pipelined", "ratio": 0.95, "num_identical": 2, "num_texts": 2}
    points = [point] * 8 + [{**point, "ratio": 0.85}]
    assert [mark["reached"] for mark in marks.agreement_marks(points)] == [False, True]
    assert [mark["reached"] for mark in marks.agreement_marks([*points, point])] == [True, True]
    different = [*points, {**point, "num_identical": 1, "condition": "slow stage", "ratio": 0.8}]
    assert [mark["reached"] for mark in marks.agreement_marks(different)] == [False, False, False]
