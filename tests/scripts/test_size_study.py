"""The size study on a tiny target: every method in every cell, a resume, the figures, bad input."""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.target.config import TargetConfig
from outrider.models.target.loading import load_target

SCRIPTS = Path(__file__).parents[2] / "scripts"
KINDS = {"rd": {"kind": "redrafter", "beam_width": 2, "beam_length": 3}, "eagle": {"kind": "eagle", "depth": 3, "top_k": 2}}
METHODS = ["plain", "transformers generate", "transformers prompt lookup", "rd, 3 nodes", "eagle, 4 nodes"]


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
        assert row["unexplained"] == []
        assert (row["milliseconds_per_step"] is None) == row["method"].startswith("transformers")
        if row["dtype"] == "float32":
            assert row["num_identical"] == row["num_prompts"] == 2
        if row["method"] in METHODS[:2]:
            assert row["tokens_per_step"] == 1
    assert {len(tries) for cell in record["cells"] for answers in cell["answers"].values() for tries in answers} <= {1, 2, 3}
    assert [cell["transformers_shares_weights"] for cell in record["cells"]] == [False, False]
    assert {answer["num_tokens"] for cell in record["cells"] for answer in cell["answers"]["plain"][0]} == {6}
    assert not (output / "targets").exists()
    assert (output / "speedup.png").read_bytes()[:4] == b"\x89PNG"
    text = (output / "table.md").read_text()
    assert text.count("\n| 60K | ") == len(rows)
    assert text.split("\n| size |")[0] in capsys.readouterr().out


def test_a_killed_study_loses_one_cell(
    run: Callable[..., Path], study: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, measured = study.measure_cell, []

    def killed_in_the_second(folder: Path, *arguments: Any, **options: Any) -> Any:
        measured.append(options["dtype"])
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(folder, *arguments, **options)

    monkeypatch.setattr(study, "measure_cell", killed_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(dtypes=("float32", "bfloat16"))
    assert "2 cells, of which 0 are done" in capsys.readouterr().out
    output = run(dtypes=("float32", "bfloat16"))
    assert measured == ["float32", "bfloat16", "bfloat16"]
    assert "2 cells, of which 1 are done" in capsys.readouterr().out
    assert not (output / "targets").exists()
    # More sizes join a finished study, and other settings don't.
    run(sizes=("60K", "70K"))
    assert measured[3:] == ["float32"]
    with pytest.raises(ValueError, match=r"new_tokens.*--output"):
        run("--new-tokens", "7")


def test_a_plan_writes_nothing(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("--plan").exists()
    assert "60K (4 layers), float32, 1 thread: about" in capsys.readouterr().out


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


def answer(seconds: float, *, num_tokens: int = 5, num_steps: int = 4, draft: float | None = None) -> dict[str, Any]:
    phases = None if draft is None else {"prefill": 0.0, "draft": draft, "verify": seconds - draft, "accept": 0.0, "rest": 0.0}
    times = {"seconds": seconds, "processor_seconds": 2 * seconds, "num_steps": num_steps, "phases": phases}
    return {"token_ids": list(range(num_tokens)), **times}


def cell(drafted: float, *, dtype: str = "float32", plain: float = 4.0, theirs: float = 5.0) -> dict[str, Any]:
    """Make the record of a cell with two prompts and one ReDrafter, which accepts a token a step."""
    answers = {
        "plain": [[answer(plain, draft=0.0)]] * 2,
        "transformers generate": [[answer(theirs)]] * 2,
        "transformers prompt lookup": [[answer(theirs)]] * 2,
        "rd, 5 nodes": [[answer(drafted, num_steps=2, draft=0.5)]] * 2,
    }
    settings = {"drafters": [{"name": "rd, 5 nodes", "kind": "redrafter", "setting": {}}]}
    head = {"size": "400M", "dtype": dtype, "threads": 2, "parameters": 4e8, "settings": settings, "unexplained": {}}
    return {**head, "used_rounds": [0, 0], "answers": answers}


def test_figures_of_a_cell_by_hand(report: Any) -> None:
    rows = {row["method"]: row for row in report.rows_of(cell(2.5))}
    drafted = rows["rd, 5 nodes"]
    assert (drafted["baseline"], drafted["speedup"], drafted["speedup_ci95"]) == ("plain", 1.6, (1.6, 1.6))
    assert (drafted["tokens_per_step"], drafted["tokens_per_second"], drafted["num_faster"]) == (2.0, 2.0, 2)
    assert drafted["milliseconds_per_step"] == {"draft": 250.0, "verify": 1000.0, "accept": 0.0, "rest": 0.0}
    assert drafted["ceiling"] == pytest.approx(2 / 1.25)
    assert (rows["plain"]["speedup"], rows["transformers generate"]["speedup"]) == (1.0, 0.8)
    # The faster plain decoding is the baseline, whoever's it is.
    slower = {row["method"]: row for row in report.rows_of(cell(2.5, theirs=2.0))}
    assert slower["rd, 5 nodes"]["speedup"] == 0.8
    assert slower["plain"]["speedup"] == 0.5


@pytest.mark.parametrize(
    ("drafted", "has_matrices", "words"),
    [(2.5, False, "1.5x at 400M, in the machine's better type: reached, 1.60x"), (2.5, True, "NOT reached, 1.60x")],
)
def test_marks_and_the_budget(report: Any, drafted: float, has_matrices: bool, words: str) -> None:
    rows = [*report.rows_of(cell(9.0, dtype="bfloat16", plain=8.0, theirs=9.0)), *report.rows_of(cell(drafted))]
    lines = report.notes(rows, has_bf16_matrices=has_matrices)
    assert any(words in line for line in lines), lines
    assert any("250.0, verify 1000.0" in line and "if drafting cost nothing 2.00x" in line for line in lines)
    assert any("each cell: reached" in line for line in lines)


def test_the_summary_has_a_column_for_each_size(report: Any) -> None:
    small = {**cell(5.0), "size": "7M", "parameters": 7e6}
    lines = report.summary(report.rows_of(small) + report.rows_of(cell(2.5))).splitlines()
    assert lines[0] == "| float32, 2 threads | 7M | 400M |"
    assert lines[-2:] == ["| rd, 5 nodes | 0.80x | 1.60x |", "| tokens/s of the faster plain one | 1.2 | 1.2 |"]


def test_what_cannot_be_true_is_named(report: Any) -> None:
    record = cell(1.0, theirs=2.0)
    record["unexplained"] = {"rd, 5 nodes": [1]}
    lines = report.notes(report.rows_of(cell(1.0)) + report.rows_of(record), has_bf16_matrices=False)
    assert any("WRONG TEXT: rd, 5 nodes" in line for line in lines)
    assert any("Measurement error" in line and "2.00 tokens per step" in line for line in lines)
    assert any("not reached by plain" in line for line in lines)


def test_a_stall_is_decoded_again_and_the_least_disturbed_round_counts(study: Any) -> None:
    methods = importlib.import_module("size_methods")

    def round_of(*seconds: float) -> dict[str, Any]:
        return {
            name: methods.Answer(token_ids=[1, 2], seconds=value, processor_seconds=value, num_steps=1)
            for name, value in zip("ab", seconds, strict=True)
        }

    rounds = [[round_of(1, 1)], [round_of(1, 30)], [round_of(1, 1.5)]]
    assert methods.stalled(rounds) == [1]
    rounds[1].append(round_of(1.1, 1.1))
    assert methods.stalled(rounds) == []
    assert methods.least_disturbed(rounds)[1] is rounds[1][1]


@pytest.mark.parametrize(("free_bytes", "is_shared"), [(1 << 30, False), (1 << 10, True), (None, False)])
def test_transformers_gets_weights_of_its_own_where_memory_allows_it(
    study: Any, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int | None, is_shared: bool
) -> None:
    """Our target may change the memory order of its weights, which would change transformers' speed."""
    methods = importlib.import_module("size_methods")
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))
    monkeypatch.setattr(methods, "available_memory", lambda: free_bytes)
    theirs = methods.their_target(target, tiny_target_dir, "float32")
    assert (theirs is target) == is_shared
    assert is_shared or not theirs.fast_linears
