"""The size study on a tiny target: every method in every cell, a resume, the figures, bad input."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

SCRIPTS = Path(__file__).parents[2] / "scripts"
KINDS = {"rd": {"kind": "redrafter", "beam_width": 2, "beam_length": 3}, "eagle": {"kind": "eagle", "depth": 3, "top_k": 2}}
PLAIN, TRANSFORMERS, LOOKUP = "plain", "transformers generate", "transformers prompt lookup"
METHODS = [PLAIN, TRANSFORMERS, LOOKUP, "rd, 3 nodes", "eagle, 4 nodes"]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("size_study")


@pytest.fixture
def report(study: Any) -> Any:
    return importlib.import_module("size_report")


@pytest.fixture(scope="module")
def drafters(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the option --drafters for a ReDrafter and an EAGLE with random weights."""
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))
    root = tmp_path_factory.mktemp("drafters")
    torch.manual_seed(0)
    for name, options in KINDS.items():
        save_drafter(build_drafter(parse_drafter(options), target), root / name / "drafter", target.identity)
    rd, eagle = root / "rd" / "drafter", root / "eagle" / "drafter"
    return [f"rd={rd}:{{beam_width: 2, tree_nodes: 3}}", f"eagle={eagle}:{{tree_nodes: 4}}"]


@pytest.fixture
def run(study: Any, tiny_target_dir: Path, drafters: list[str], tmp_path: Path) -> Callable[..., Path]:
    def call(*changes: str, sizes: tuple[str, ...] = ("60K",), dtypes: tuple[str, ...] = ("float32",)) -> Path:
        cells = ["--target", str(tiny_target_dir), "--sizes", *sizes, "--dtypes", *dtypes, "--threads", "1"]
        small = ["--prompts", "2", "--new-tokens", "6", "--drafters", *drafters, "--output", str(tmp_path / "study")]
        study.run(study.parse_args([*cells, *small, *changes]))
        return tmp_path / "study"

    return call


def test_every_method_is_measured_in_every_cell(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    output = run(dtypes=("float32", "bfloat16"))
    record = json.loads((output / "size_study.json").read_text())
    rows = record["rows"]
    assert [row["method"] for row in rows] == METHODS * 2
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    for row in rows:
        assert row["parameters"] == pytest.approx(60_000, rel=0.1)
        assert row["tokens_per_second"] > 0
        assert row["fault"] == ""
        assert row["processor_speedup"] > 0
        assert (row["milliseconds_per_step"] is None) == row["method"].startswith("transformers")
        if row["dtype"] == "float32":
            assert row["num_identical"] == row["num_prompts"] == 2
        if row["method"] in METHODS[:2]:
            assert row["tokens_per_step"] == 1
    assert [(cell["dtype"], cell["layers"]) for cell in record["cells"]] == [("float32", 4), ("bfloat16", 4)]
    assert not (output / "targets").exists()
    assert (output / "speedup.png").read_bytes()[:4] == b"\x89PNG"
    text = (output / "table.md").read_text()
    assert all(text.count(f"\n| {method} | ") == 2 for method in METHODS)
    assert text in capsys.readouterr().out


def test_a_killed_study_resumes_its_cell(
    run: Callable[..., Path], study: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate, measured, study_cells = study.evaluate, [], sys.modules["study_cells"]

    def killed_in_the_second(config: Any, target: Any, *arguments: Any, **options: Any) -> Any:
        measured.append(str(target.dtype).removeprefix("torch."))
        if len(measured) == 2:
            raise KeyboardInterrupt
        return evaluate(config, target, *arguments, **options)

    monkeypatch.setattr(study, "evaluate", killed_in_the_second)
    is_disturbed = study_cells.is_disturbed
    monkeypatch.setattr(study_cells, "is_disturbed", lambda row: False)  # a busy machine measures a cell again
    with pytest.raises(KeyboardInterrupt):
        run(dtypes=("float32", "bfloat16"))
    assert "2 cells, 0 of them done" in capsys.readouterr().out
    output = run(dtypes=("float32", "bfloat16"))
    assert measured == ["float32", "bfloat16", "bfloat16"]
    assert "2 cells, 1 of them done" in capsys.readouterr().out
    assert not (output / "targets").exists()
    # More sizes join a finished study, and other settings don't.
    run(sizes=("60K", "70K"))
    assert measured[3:] == ["float32"]
    with pytest.raises(ValueError, match=r"new_tokens.*--output"):
        run("--new-tokens", "7")
    # A cell with a disturbed answer isn't done; one of another environment can't continue.
    summary = output / "cells" / "60K-float32-1" / "summary.json"
    rows = json.loads(summary.read_text())
    disturbed = {"prompt_ids": ["0"], "turn": 0, "repeat": 0, "side": "method", "ratio": 9.0}
    summary.write_text(json.dumps([{**row, "disturbed": [disturbed]} for row in rows]))
    summary.with_name("facts.json").unlink()  # it has the digest of the summary
    monkeypatch.setattr(study_cells, "is_disturbed", is_disturbed)
    run()
    monkeypatch.setattr(study_cells, "is_disturbed", lambda row: False)
    assert measured[4:] == ["float32"]
    info = json.loads(summary.with_name("run.json").read_text())
    info["environment"]["linears"] = "packed"
    summary.with_name("run.json").write_text(json.dumps(info))
    run()
    assert len(measured) == 5, "only an evaluation knows the choice of linear layers"
    info["environment"]["num_threads"] = 3
    summary.with_name("run.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"num_threads.*--output"):
        run()


def test_a_plan_writes_nothing(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("--plan").exists()
    printed = capsys.readouterr().out
    assert "1 cell, 0 of them done" in printed
    assert "60K (4 layers), float32, 1 thread: at least" in printed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--sizes", "1K"], "can't shrink"),
        (["--sizes", "big"], "'big'"),
        (["--threads", "0"], "--threads"),
        (["--prompts", "0"], "--prompts"),
        (["--drafters", "nothing"], "NAME=FOLDER"),
        (["--drafters", "a=none"], "none holds no drafter"),
        (["--drafters", "a=FOLDER:{"], "no YAML"),
        (["--drafters", "a=FOLDER:5"], "no mapping"),
        (["--drafters", "a=FOLDER:{width: 5}"], "width"),
        (["--drafters", "a=FOLDER:{tree_nodes: 3}", "a=FOLDER:{tree_nodes: 3}"], "'a, 3 nodes'"),
    ],
)
def test_wrong_options_raise_errors(
    run: Callable[..., Path], drafters: list[str], tmp_path: Path, changes: list[str], words: str
) -> None:
    folder = drafters[0].split("=", 1)[1].split(":")[0]
    with pytest.raises(ValueError, match=words):
        run(*(change.replace("FOLDER", folder) for change in changes))
    assert not (tmp_path / "study").exists()


def test_without_drafters_the_commands_that_make_them_are_named(
    study: Any, drafters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="conf=demo"):
        study.default_drafters()
    shutil.copytree(drafters[0].split("=")[1].split(":")[0], tmp_path / "outputs" / "demo" / "drafter")
    assert [drafter.name for drafter in study.default_drafters()] == ["demo, 5 nodes", "demo, 40 nodes"]


def row(method: str, speed: float = 1.0, *, tau: float = 1.0, draft: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Build an evaluation's row: a plain step takes 1 s, and a step with drafts tau / speed."""
    step = tau / speed
    return {
        "method": method,
        "speedup": speed,
        "speedup_ci95": None if method == "baseline" else (speed, speed),
        "processor_speedup": speed,
        "tokens_per_step": tau,
        "tokens_per_second": speed,
        "decode_tokens_per_second": speed,
        "time_split": {"draft": draft / step, "verify": 1 - draft / step, "accept": 0.0, "rest": 0.0},
        "ceiling": tau / (1 + draft),
        "exceeds": "",
        "disturbed": [],
        "num_repeated": 0,
        "num_prompts": 2,
        "num_mismatched_prompts": 0,
        "lossless_label": "yes",
        "out_of_memory": False,
        **changes,
    }


@pytest.fixture
def cell(study: Any, report: Any) -> Callable[..., list[dict[str, Any]]]:
    """Return the rows of a cell with one ReDrafter, which accepts a token a step."""
    drafter = study.DrafterSetting(name="rd, 5 nodes", kind="redrafter", folder=Path(), setting={})

    def build(drafted: float, *, transformers: float = 0.8, size: str = "400M", dtype: str = "float32", **changes: Any) -> Any:
        lookup = row(LOOKUP, 0.8, time_split=None)
        methods = [row("baseline"), row("rd", drafted, tau=2.0, draft=0.25, **changes), lookup]
        methods.append(row(TRANSFORMERS, transformers, time_split=None))
        head = {"size": size, "dtype": dtype, "threads": 2, "layers": 8, "parameters": 4e8 if size == "400M" else 7e6}
        return report.rows_of(methods, head, {"rd": drafter})

    return build


def test_figures_of_a_cell_by_hand(cell: Callable[..., Any], report: Any) -> None:
    rows = {row["method"]: row for row in cell(1.6)}
    assert list(rows) == [PLAIN, TRANSFORMERS, LOOKUP, "rd, 5 nodes"]
    drafted = rows["rd, 5 nodes"]
    assert (drafted["baseline"], drafted["speedup"], drafted["speedup_ci95"]) == ("plain", 1.6, [1.6, 1.6])
    milliseconds = {"draft": 250.0, "verify": 1000.0, "accept": 0.0, "rest": 0.0}
    assert drafted["milliseconds_per_step"] == pytest.approx(milliseconds)
    assert (rows["plain"]["speedup"], rows["transformers generate"]["speedup"]) == (1.0, 0.8)
    # The faster plain decoding is the baseline, ours or transformers'.
    slower = {row["method"]: row for row in cell(1.6, transformers=2.0)}
    assert slower["rd, 5 nodes"]["speedup"] == slower["rd, 5 nodes"]["processor_speedup"] == 0.8
    assert slower["rd, 5 nodes"]["speedup_ci95"] == [0.8, 0.8]
    assert (slower["plain"]["speedup"], slower["plain"]["baseline"]) == (0.5, "transformers generate")


@pytest.mark.parametrize(
    ("has_matrices", "words"),
    [(False, "1.5x at 400M, in the machine's better type: reached, 1.60x"), (True, "NOT reached, 1.60x")],
)
def test_marks_and_the_budget(report: Any, cell: Callable[..., Any], has_matrices: bool, words: str) -> None:
    slow = [{**row, "tokens_per_second": row["tokens_per_second"] / 2} for row in cell(1.9, dtype="bfloat16")]
    lines = report.notes([*slow, *cell(1.6)], has_bf16_matrices=has_matrices)
    assert any(words in line for line in lines), lines
    assert any("250.0, verify 1000.0" in line and "if drafting cost nothing 2.00x" in line for line in lines)
    assert any("each cell: reached" in line for line in lines)


def test_the_summary_has_a_column_for_each_size(report: Any, cell: Callable[..., Any]) -> None:
    lines = report.summary(cell(0.8, size="7M") + cell(1.6)).splitlines()
    assert lines[0] == "| float32, 2 threads | tokens per step | 7M | 400M |"
    assert lines[-2:] == [
        "| rd, 5 nodes | 2.00 | 0.80x [0.80, 0.80] | 1.60x [1.60, 1.60] |",
        "| tokens/s of the faster plain one | - | 1.0 | 1.0 |",
    ]


def test_what_cannot_be_true_has_no_speed(report: Any, cell: Callable[..., Any], tmp_path: Path) -> None:
    wrong = cell(1.6, size="7M", speedup=None, speedup_ci95=None, lossless_label="NO (1 of 2 prompts)")
    rows = [*wrong, *cell(4.0, exceeds="tokens per step")]
    lines = report.notes(rows, has_bf16_matrices=False)
    assert any("rd, 5 nodes (7M, float32, 2 threads): it is not lossless" in line for line in lines)
    assert any("would exceed its 2.00 tokens per step" in line for line in lines)
    assert any("not measured" in line for line in lines), "an error of measurement reaches no mark"
    assert "| rd, 5 nodes | 2.00 | not lossless | error |" in report.summary(rows)
    report.plot(rows, tmp_path / "speedup.png")
    slow = report.notes(cell(1.6, transformers=2.0), has_bf16_matrices=False)
    assert any("not reached by plain" in line for line in slow)


def test_a_stall_in_all_attempts_is_marked(report: Any, cell: Callable[..., Any], tmp_path: Path) -> None:
    stall = {"prompt_ids": ["0"], "turn": 0, "repeat": 0, "side": "method", "ratio": 300.0}
    rows = cell(1.6, disturbed=[stall], num_repeated=2)
    assert "| 1.60x [1.60, 1.60], disturbed |" in report.summary(rows)
    lines = report.notes(rows, has_bf16_matrices=False)
    assert any("same command measures only these answers again" in line for line in lines)
    assert any(line.startswith("2 answers were decoded again") for line in lines)
    assert any("reached, 1.60x [1.60, 1.60], disturbed" in line for line in lines)
    report.plot(rows, tmp_path / "speedup.png")


def test_the_benchmarks_page_shows_the_marks(study: Any, cell: Callable[..., Any]) -> None:
    page = importlib.import_module("benchmarks_page.studies")
    stall = {"prompt_ids": ["0"], "turn": 0, "repeat": 0, "side": "method", "ratio": 300.0}
    rows = [*cell(1.9, disturbed=[stall]), *cell(4.0, size="7M", exceeds="tokens per step")]
    assert "| rd, 5 nodes | 2.00 | 1.90x, disturbed | error |" in page.sizes(SimpleNamespace(read=lambda _: {"rows": rows}), "")


@pytest.mark.parametrize(("free_bytes", "is_shared"), [(1 << 30, False), (1 << 10, True), (None, False)])
def test_transformers_gets_weights_of_its_own_where_memory_allows_it(
    study: Any, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int | None, is_shared: bool
) -> None:
    """Our target may change the memory order of its weights, which would change transformers' speed."""
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))
    monkeypatch.setattr(importlib.import_module("study_cells"), "available_memory", lambda: free_bytes)
    weights = study.transformers_target(target, tiny_target_dir, "float32")
    assert (weights is target) == is_shared
    assert is_shared or not weights.fast_linears
