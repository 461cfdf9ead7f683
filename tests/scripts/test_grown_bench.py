"""The GPU benchmark of a grown target, on a CPU with a tiny one: real drafters, shares, goals."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter, save_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target, load_tokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in (SCRIPTS, SCRIPTS / "gpu"):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("grown_bench")


@pytest.fixture
def bench(script: Any, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return `decode_bench.py --grown` with a draft model of the target's first layer."""
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))
    options = {"kind": "draft_model", "init": "target_layers", "num_layers": 2, "length": 3}
    save_drafter(build_drafter(parse_drafter(options), target), tmp_path / "drafter", target.identity)

    def run(*changes: str) -> dict[str, Any]:
        command = ["decode_bench.py", "--grown", f"dm={tmp_path / 'drafter'}:{{length: 3, top_k: 1}}", "--device", "cpu"]
        command += ["--target", str(tiny_target_dir), "--parameters", "90K", "--prompts", "2", "--new-tokens", "9"]
        monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "grown.json"), *changes])
        importlib.import_module("decode_bench").main()
        report: dict[str, Any] = json.loads((tmp_path / "grown.json").read_text())
        return report

    return run


def test_real_drafters_have_their_real_acceptance(bench: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The draft model is the whole small target, so every draft token is accepted."""
    report = bench("--forms", "eager", "cuda_graph")
    assert report["failed"] == report["skipped"] == []
    plain, drafted = report["rows"]
    assert {plain["form"], drafted["form"]} == {"eager"}, "a CPU has no CUDA graphs"
    assert (plain["method"], plain["tokens_per_step"], plain["speedup"]) == ("plain", 1.0, pytest.approx(1.0))
    assert drafted["tokens_per_step"] == 4.0
    assert drafted["num_identical"] == drafted["num_prompts"] == 2
    assert drafted["draft_milliseconds"] > plain["draft_milliseconds"] >= 0
    least = 1e3 * report["target_bytes"] / report["memory_bytes_per_second"]
    for row in (plain, drafted):
        assert row["bandwidth_share"] == pytest.approx(least / row["milliseconds_per_step"], rel=0.01)
    assert report["target"]["parameters"] == pytest.approx(90_000, rel=0.2)
    printed = capsys.readouterr().out
    assert printed.count("Goal, ") == 2
    assert "costs as much as a large model" in printed


def test_forms_that_fail_or_come_too_late_are_listed(
    bench: Callable[..., Any], script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench("--forms", "eager", "--budget-seconds", "0")["skipped"] == ["eager"]

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(script, "measure", fail)
    assert bench("--forms", "eager")["failed"] == [{"form": "eager", "error": "out of memory"}]


@pytest.mark.parametrize(("option", "words"), [("--new-tokens", "context window of 1024"), ("--parameters", "can't shrink")])
def test_wrong_options_end_the_benchmark(bench: Callable[..., Any], option: str, words: str) -> None:
    """They are no failure of a form."""
    with pytest.raises(SystemExit, match=words):
        bench("--forms", "eager", option, {"--new-tokens": "5000", "--parameters": "1K"}[option])


def test_shares_of_ceiling_by_hand(script: Any) -> None:
    """The fastest plain step, of all forms, takes 10 ms; drafting takes 2.5 ms of the other step."""
    rows = [
        {"method": "plain", "tokens_per_step": 1.0, "milliseconds_per_step": 20.0, "draft_milliseconds": 0.0},
        {"method": "plain", "tokens_per_step": 1.0, "milliseconds_per_step": 10.0, "draft_milliseconds": 0.0},
        {"method": "dm", "tokens_per_step": 3.0, "milliseconds_per_step": 20.0, "draft_milliseconds": 2.5},
    ]
    rows = [{**row, "tokens_per_second": 1e3 * row["tokens_per_step"] / row["milliseconds_per_step"]} for row in rows]
    script.add_shares(rows)
    assert [row["speedup"] for row in rows] == pytest.approx([0.5, 1.0, 1.5])
    assert [row["ceiling"] for row in rows] == pytest.approx([1.0, 1.0, 2.4])
    assert [row["ceiling_share"] for row in rows] == pytest.approx([0.5, 1.0, 0.625])
    script.add_shares([])


def test_a_target_built_in_memory_has_the_originals_text(script: Any, tiny_target_dir: Path) -> None:
    source = script.Source.of(tiny_target_dir)
    model = script.grown_model(source, source.grown_size(4, 192), torch.float32, torch.device("cpu"))
    grown = script.target_of(model, load_tokenizer(TargetConfig(name_or_path=str(tiny_target_dir))))
    original = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))
    texts = [
        [step.tokens for step in generate(target, NullDrafter(), GreedyAcceptance(), torch.arange(9)[None], max_new_tokens=20)]
        for target in (grown, original)
    ]
    assert texts[0] == texts[1]
    assert grown.stop_ids == original.stop_ids


def test_goals_are_of_the_fastest_rows(script: Any) -> None:
    rows = [
        {"method": "plain", "form": "eager", "tokens_per_second": 50.0, "bandwidth_share": 0.4, "ceiling_share": 1.0},
        {"method": "plain", "form": "cuda_graph", "tokens_per_second": 90.0, "bandwidth_share": 0.8, "ceiling_share": 1.0},
        {"method": "dm", "form": "cuda_graph", "tokens_per_second": 150.0, "bandwidth_share": 0.5, "ceiling_share": 0.7},
    ]
    first, second = script.goals(rows)
    assert "NOT reached, 0.70 by dm, cuda_graph" in first
    assert ": reached, 0.80 by plain, cuda_graph" in second
