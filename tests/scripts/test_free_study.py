"""The study of free drafts on a tiny target: every part, a resume, marks by hand, bad input."""

import importlib
import json
import shutil
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
BENCHMARKS = SCRIPTS.parent / "benchmarks"
KINDS: dict[str, dict[str, Any]] = {
    "drafter": {"kind": "redrafter", "beam_width": 2, "beam_length": 3},
    "assistant": {"kind": "draft_model", "num_layers": 1},
}
THEIRS = ["transformers generate", "transformers prompt lookup", "transformers assisted generation"]
FREE = ["prompt_lookup", "suffix", "recycling"]
PARTS = ("demo", "sampled", "batch", "grown", "pace")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("free_study")


@pytest.fixture(scope="module")
def folders(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a ReDrafter and a draft model with random weights."""
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))
    root = tmp_path_factory.mktemp("drafters")
    for seed, (name, options) in enumerate(KINDS.items()):
        torch.manual_seed(seed)
        save_drafter(build_drafter(parse_drafter(options), target), root / name, target.identity)
    return {name: root / name for name in KINDS}


@pytest.fixture
def run(study: Any, tiny_target_dir: Path, folders: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    def call(*changes: str, parts: tuple[str, ...] = ("demo",)) -> Path:
        names = [f"--{name}={folder}" for name, folder in folders.items()]
        small = ["--prompts", "4", "--new-tokens", "6", "--repeats", "1", "--threads", "1", "--widths", "2", "--size", "60K"]
        small += ["--grown-prompts", "3", "--suite-prompts", "4", "--output", str(tmp_path / "study")]
        study.run(study.parse_args(["--target", str(tiny_target_dir), "--parts", *parts, *names, *small, *changes]))
        return tmp_path / "study"

    return call


def test_every_method_of_the_demo_is_measured(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    output = run(parts=("demo",))
    record = json.loads((output / "free_study.json").read_text())
    rows = {row["method"]: row for row in record["rows"]}
    assert list(rows) == [
        *("plain", *FREE, "suffix+recycling, expected", "ReDrafter, 5 nodes", "ReDrafter, 40 nodes"),
        *(*merged(record), *THEIRS),
    ]
    for name, row in rows.items():
        assert row["fault"] == "", name
        assert row["num_identical"] == row["num_prompts"] == len(row["by_prompt"]) == 4, name
        assert row["least_repeating"]["num_compared"] == 1, name
    against = {(pair["method"], pair["against"]) for pair in record["pairs"]}
    assert against == {
        *(("merged, expected", name) for name in (*THEIRS, "best fixed", "default fixed")),
        ("prompt_lookup", "transformers prompt lookup"),
    }
    for name in ("speedup.png", "prompts.png"):
        assert (output / name).read_bytes()[:4] == b"\x89PNG"
    text = (output / "table.md").read_text()
    assert text in capsys.readouterr().out
    assert text.count("Mark: ") == len(record["marks"]) > 5


@pytest.mark.slow
@pytest.mark.long
def test_every_part_is_measured_once(run: Callable[..., Path]) -> None:
    output = run(parts=PARTS)
    record = json.loads((output / "free_study.json").read_text())
    methods = {part: list(dict.fromkeys(row["method"] for row in record["rows"] if row["part"] == part)) for part in PARTS}
    assert methods["sampled"] == methods["batch"] == ["plain", *FREE, "ReDrafter, 40 nodes", *merged(record)]
    assert set(THEIRS) < set(methods["grown"])
    assert methods["pace"] == ["plain", "merged, fixed, 2 nodes", *merged(record)]
    for row in record["rows"]:
        assert row["fault"] == "", row["method"]
        if row["dtype"] == "float32":
            assert row["num_identical"] == row["num_prompts"] > 0, row["method"]
        if row["part"] == "grown":
            assert (row["size"], row["num_prompts"]) == ("60K", 3)
    assert len({(row["temperature"], row["batch_size"]) for row in record["rows"] if row["part"] == "pace"}) == 4
    assert {pair["against"] for pair in record["pairs"] if pair["part"] == "grown"} == {*THEIRS, "best fixed", "default fixed"}
    assert not (output / "targets").exists()
    assert (output / "pace.png").read_bytes()[:4] == b"\x89PNG"
    # The same command measures nothing again.
    before = {path: path.stat().st_mtime_ns for path in output.glob("cells/*/records.jsonl")}
    assert len(before) == 6
    run(parts=PARTS)
    assert {path: path.stat().st_mtime_ns for path in output.glob("cells/*/records.jsonl")} == before


def merged(record: dict[str, Any]) -> list[str]:
    return [f"merged, fixed, {record['default_nodes']} nodes", "merged, expected"]


def test_later_parts_join_the_record(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    run(parts=("sampled",))
    output = run(parts=("batch",))
    record = json.loads((output / "free_study.json").read_text())
    assert {row["part"] for row in record["rows"]} == {"sampled", "batch"}
    with pytest.raises(ValueError, match=r"max_new_tokens.*--output"):
        run("--new-tokens", "7", parts=("sampled",))


def test_a_plan_writes_nothing(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("--plan", parts=("demo", "pace")).exists()
    printed = capsys.readouterr().out
    assert "2 cells, 0 of them done" in printed
    assert "demo: 12 methods, about" in printed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--prompts", "0"], "--prompts"),
        (["--widths", "0"], "--widths"),
        (["--size", "big"], "'big'"),
        (["--free", "sufix"], "sufix"),
        (["--drafter", "none"], "none holds no drafter"),
        (["--suites", "mt_bnch"], "mt_bnch"),
        (["--suite-prompts", "2"], "--suite-prompts"),
        (["--assistant", "DRAFTER"], "holds a redrafter"),
        (["--search", "5"], "--search is no mapping"),
        (["--search", "{beams: 5}"], "beams"),
        (["--others", "nothing"], "NAME=FOLDER"),
    ],
)
def test_wrong_options_raise_errors(
    run: Callable[..., Path], folders: dict[str, Path], tmp_path: Path, changes: list[str], words: str
) -> None:
    changes = [str(folders["drafter"]) if change == "DRAFTER" else change for change in changes]
    with pytest.raises(ValueError, match=words):
        run(*changes, parts=("demo", "pace"))
    assert not (tmp_path / "study").exists()


def test_how_much_an_answer_repeats_itself(study: Any) -> None:
    figures = importlib.import_module("free_figures")
    answers = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 1, 2, 1, 2, 1, 2], "c": [7, 7, 7]}
    records = [
        SimpleNamespace(prompt_id=name, unit=name, token_ids=tokens, repeat=0, attempt=0) for name, tokens in answers.items()
    ]
    assert figures.distinct_shares(records) == {"a": 1.0, "b": 2 / 5, "c": 1.0}
    assert figures.least_repeating(records) == {"a"}


def row(
    method: str, part: str = "demo", *, speedup: float = 2.0, tau: float = 3.5, kind: str = "merged", **changes: Any
) -> Any:
    """Build a row of the study."""
    times = {"speedup": speedup, "speedup_ci95": [speedup, speedup], "processor_speedup": speedup, "num_compared": 2}
    return {
        "cell": part,
        "part": part,
        "size": None,
        "dtype": "float32",
        "threads": 2,
        "suite": "stdlib",
        "temperature": 0.0,
        "batch_size": 1,
        "method": method,
        "kind": kind,
        "baseline": "plain",
        "tokens_per_step": tau,
        "draft_tokens_per_step": 9.0,
        "tokens_per_second": 100.0,
        "num_prompts": 2,
        "num_identical": 2,
        "sources": "ReDrafter 40 %, bonus 60 %",
        "num_repeated": 0,
        "exceeds": "",
        "disturbed": [],
        "fault": "",
        "lossless_label": "yes",
        **times,
        "least_repeating": {**times, "speedup": speedup / 1.5},
        "by_prompt": {"a": {"speedup": speedup, "distinct": 0.5}, "b": {"speedup": speedup / 2, "distinct": 0.9}},
        **changes,
    }


def pair(against: str, speedup: float, part: str = "demo", method: str = "merged, expected", **changes: Any) -> Any:
    """Build a comparison of two methods."""
    return {**row(method, part, speedup=speedup), "against": against, "other": against, **changes}


@pytest.fixture
def verdicts(study: Any) -> Callable[..., dict[str, bool]]:
    judge = importlib.import_module("free_marks").judge
    return lambda rows, pairs=(), amx=False: {
        mark["rule"]: mark["reached"] for mark in judge(rows, pairs, has_bf16_matrices=amx)
    }


def test_marks_are_judged_by_their_figures(verdicts: Callable[..., Any]) -> None:
    rows = [row("merged, expected"), row("recycling", tau=2.5, kind="free")]
    assert set(verdicts(rows).values()) == {True}
    reached = verdicts([row("merged, expected", speedup=1.6, tau=2.9), row("recycling", tau=2.4, kind="free")])
    assert [rule for rule, value in reached.items() if value] == ["all answers identical there"]
    assert not verdicts([row("merged, expected", num_identical=1)])["all answers identical there"]
    # An impossible speed reaches nothing.
    rule = "merged, expected (stdlib, greedy) at least 1.8x"
    assert verdicts([row("merged, expected")])[rule]
    assert not verdicts([row("merged, expected", exceeds="tokens per step")])[rule]
    assert not verdicts(
        [row("merged, expected", fault="not lossless", exceeds="", by_prompt={}, least_repeating=None) | {"speedup": None}]
    )[rule]
    assert verdicts([]) == {}


def test_the_better_one_of_transformers_methods_counts(verdicts: Callable[..., Any]) -> None:
    lookup, assisted = THEIRS[1:]
    (rule,) = [rule for rule in verdicts([row("merged, expected")], [pair(lookup, 1.3)]) if "transformers" in rule]
    for speed, reached in ((1.2, True), (1.1, False)):
        pairs = [pair(lookup, 1.3), pair(assisted, speed)]
        assert verdicts([row("merged, expected")], pairs)[rule] == reached


def test_the_grown_target_has_a_higher_mark_where_there_are_matrix_instructions(verdicts: Callable[..., Any]) -> None:
    rows = [row("merged, expected", "grown", speedup=2.5, dtype=dtype, size="400M") for dtype in ("float32", "bfloat16")]
    assert list(verdicts(rows).values()) == [True, True]
    assert list(verdicts(rows, amx=True).values()) == [True, False]


def test_pace_is_judged_over_all_cases(verdicts: Callable[..., Any]) -> None:
    fast = [pair("best fixed", 1.1, "pace"), pair("default fixed", 1.4, "pace")]
    assert list(verdicts([], fast).values()) == [True, True, True]
    slow = [*fast, pair("best fixed", 0.96, "pace", temperature=1.0), pair("default fixed", 0.8, "grown", size="400M")]
    assert list(verdicts([], slow).values()) == [True, False, False]


def test_the_pages_have_the_study_once_there_is_a_record(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row("plain", kind="plain", speedup=1.0, tau=1.0),
        row("merged, expected"),
        row("plain", "grown", kind="plain", speedup=1.0, size="400M"),
        row("plain", "grown", kind="plain", speedup=1.0, size="400M", dtype="bfloat16", tokens_per_second=500),
        row("merged, expected", "grown", size="400M", dtype="bfloat16", tokens_per_second=900, speedup=3.0),
    ]
    environment = {"cpu": "C", "num_cpus": 2, "device": "cpu", "num_threads": 2, "python": "3", "git_hash": "0"}
    environment["packages"] = {"torch": "2", "transformers": "5"}
    pairs = [pair("best fixed", 1.1, "pace"), pair("default fixed", 1.4, "pace")]
    record = {"rows": rows, "pairs": pairs, "notes": ["Mark: a: reached, 1."], "environment": environment}
    page, tables = (importlib.import_module(f"benchmarks_page.{name}") for name in ("free_drafts", "tables"))
    shutil.copytree(BENCHMARKS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.png", "free_study"))
    records, whole = tables.Records(tmp_path), importlib.import_module("make_benchmarks_page").page
    assert "### Without training" not in whole(records)
    (tmp_path / "free_study").mkdir()
    (tmp_path / page.FREE_STUDY).write_text(json.dumps(record))
    assert "### Without training" in whole(records)
    lines = page.free_table(records).splitlines()
    assert lines[0] == "| method | tokens per step | the demo's target | grown to 400M parameters |"
    assert lines[2:4] == ["| plain | 1.00 | 1.00x | 1.00x |", "| merged, expected | 3.50 | 2.00x | 3.00x |"]
    assert lines[-1] == "C, 2 cores, no GPU; float32 and bfloat16, greedy, batch size 1, 2 threads."
    assert "least repeating third" in page.free_methods(records, page.FREE_STUDY)
    assert "| demo, float32, stdlib | 0 | 1 | best fixed | 1.10x | 1.40x |" in page.free_pace(records, page.FREE_STUDY)
    assert page.free_notes(records, page.FREE_STUDY) == "- Mark: a: reached, 1."
    values = {"megabytes": 8.25, "prompt_seconds": 0.5, "add_microseconds_per_token": 6, "draft_microseconds": 30}
    texts = {"one token": {**values, "draft_microseconds_99th_percentile": 90}}
    (tmp_path / "suffix.json").write_text(json.dumps({"texts": texts, "prompt_tokens": 3, "tokens": 1000}))
    assert page.suffix_index(records, "suffix.json").splitlines()[-1] == "| one token | 8.2 | 0.50 | 6.0 | 30 | 90 |"
