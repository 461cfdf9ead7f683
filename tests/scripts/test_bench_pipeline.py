"""The pipeline bench in virtual time, in small: record, tables, marks, plots, a resume, bad input."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

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
        names = ["acceptance 0.8", "stages 2", "hop 1", "ablation 0.8"]
        options = ["--parts", "virtual", "--texts", "2", "--new-tokens", "24", "--workers", "1", "--only", *names]
        bench.run(bench.parse_args([*options, "--output", str(tmp_path / "bench"), *changes]))
        return tmp_path / "bench"

    return call


def test_the_bench_runs_to_the_end_and_resumes(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    output = run()
    record = json.loads((output / "pipeline.json").read_text())
    cells = {cell["name"]: cell for cell in record["cells"] if cell["part"] == "virtual"}
    assert set(cells) == {"acceptance 0.8", "stages 2", "hop 1 ms", "ablation 0.8"}
    rows = cells["acceptance 0.8"]["rows"]
    assert rows["plain"]["tokens_per_second"] < rows["synchronous 4"]["tokens_per_second"]
    assert rows["pipelined"]["clock"] == "virtual time"
    table = (output / "table.md").read_text()
    assert "virtual time, acceptance 0.8: at least 3x of plain" in table
    assert "PipeInfer's own rule" in table
    assert max(map(len, table.splitlines())) <= 80
    assert all((output / name).stat().st_size > 1000 for name in ("sweeps.png", "gantt.png"))
    # A resume decodes what is missing only, and gives the same record.
    capsys.readouterr()
    (output / "cells" / "virtual" / "stages_2.json").unlink()
    run()
    assert re.search(r"virtual: \d+ cells, 3 of them done", capsys.readouterr().out)
    again = json.loads((output / "pipeline.json").read_text())
    for first, second in zip(record["cells"], again["cells"], strict=True):
        for name, row in first["rows"].items():
            assert row["tokens_per_second"] == second["rows"][name]["tokens_per_second"], (first["name"], name)
    # Other sizes are other cells.
    run("--new-tokens", "16", "--plan")
    assert re.search(r"virtual: \d+ cells, 0 of them done", capsys.readouterr().out)
    # A cell that is decoded alone leaves the others in the record.
    run("--only", "ablation 0.8")
    assert len(json.loads((output / "pipeline.json").read_text())["cells"]) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--texts", "0"), "--texts is 0; give at least 1"),
        (("--new-tokens", "1"), "--new-tokens is 1; give at least 2"),
        (("--real-tokens", "1"), "--real-tokens is 1; give at least 2"),
        (("--only", "nothing"), "'nothing'.*there are: 'acceptance 0'"),
        (("--only", "acceptance 0.85"), "'acceptance 0.85'"),
    ],
)
def test_wrong_options_are_refused(run: Callable[..., Path], changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*changes)


def saved(kind: dict[str, Any], target_dir: Path, folder: Path) -> Path:
    target = load_target(TargetConfig(name_or_path=str(target_dir), dtype="float32", device="cpu", fast_linears=False))
    torch.manual_seed(0)
    save_drafter(build_drafter(parse_drafter(kind), target), folder, target.identity)
    return folder


def test_real_processes_need_a_draft_model(run: Callable[..., Path], tiny_target_dir: Path, tmp_path: Path) -> None:
    medusa = saved({"kind": "medusa"}, tiny_target_dir, tmp_path / "medusa")
    with pytest.raises(ValueError, match=f"--drafter {medusa} is a medusa"):
        run("--drafter", str(medusa), "--plan")


@pytest.mark.slow
def test_real_processes_write_the_text_of_plain_decoding(tiny_target_dir: Path, tmp_path: Path) -> None:
    """A process of its own, since stages are forks that must not follow passes of several threads."""
    drafter = saved({"kind": "draft_model", "num_layers": 1}, tiny_target_dir, tmp_path / "drafter")
    sizes = ["--parameters", "200K", "--real-texts", "2", "--real-tokens", "12", "--only", "real 2 stages"]
    folders = ["--target", str(tiny_target_dir), "--drafter", str(drafter), "--output", str(tmp_path / "bench")]
    command = [sys.executable, str(SCRIPTS / "bench_pipeline.py"), "--parts", "real", *sizes, *folders]
    for _ in range(2):  # the second run finds the cell
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert re.search(r"real: \d cells, 1 of them done", done.stdout)
    (cell,) = json.loads((tmp_path / "bench" / "pipeline.json").read_text())["cells"]
    assert set(cell["rows"]) == {"plain", "synchronous 4", "synchronous, own setting", "pipelined"}
    assert all(row["num_identical"] == 2 and row["clock"] == "real processes, wall clock" for row in cell["rows"].values())


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


def test_the_head_is_judged_by_its_worst_condition(marks: Any) -> None:
    cells = {f"acceptance {value:g}": {"pipelined": {"head_cpu_seconds_per_run": 1e-3 * value}} for value in (0.5, 1.2, 0.9)}
    judged = marks.head_mark(cells)
    assert not judged["reached"]
    assert judged["figures"] == "at most 1.20 ms (acceptance 1.2)"


def test_one_text_has_no_interval(marks: Any) -> None:
    one = {**row(2.0), "text_seconds": [0.5]}
    assert marks.text(one, {**row(1.0), "text_seconds": [1.0]}) == "2.00x [-]"


def test_a_table_of_two_clocks_is_refused(marks: Any) -> None:
    cells = {"acceptance 0.8": rows(1, 2, 2, 3), "acceptance 0.5": rows(1, 2, 2, 3, clock="emulated stages, wall clock")}
    with pytest.raises(ValueError, match="2 clocks"):
        marks.speed_marks(cells)


def test_points_far_from_the_simulator_fail_the_mark(marks: Any) -> None:
    point = {"condition": "acceptance 0.8", "method": "pipelined", "ratio": 0.95, "num_identical": 2, "num_texts": 2}
    assert [mark["reached"] for mark in marks.agreement_marks([point] * 8)] == [False, True]
    assert [mark["reached"] for mark in marks.agreement_marks([point] * 9)] == [True, True]
    # One that is far fails it, however many are close.
    assert [mark["reached"] for mark in marks.agreement_marks([*[point] * 20, {**point, "ratio": 0.85}])] == [False, True]
    different = [*[point] * 9, {**point, "num_identical": 1, "condition": "slow stage", "ratio": 0.8}]
    assert [mark["reached"] for mark in marks.agreement_marks(different)] == [False, False, False]
