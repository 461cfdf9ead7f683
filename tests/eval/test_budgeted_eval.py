"""Commands on a target with a memory budget: what they print, record and refuse."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.llm import streamed_loading
from outrider.models.llm.memory_plan import GIB

from ..commands import invoke
from ..tiny_models import save_tiny_target

TOKENS = 600


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a target of six layers, most of whose weights are in its MLPs."""
    sizes = {"num_hidden_layers": 6, "intermediate_size": 2048, "initializer_range": 0.2}
    return save_tiny_target(tmp_path_factory.mktemp("target"), LlamaForCausalLM, LlamaConfig, tiny_tokenizer, **sizes)


@pytest.fixture
def command(folder: Path, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(streamed_loading, "staging_bytes", lambda *_: 0)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": "How?"}\n')
    return [
        *("--target", str(folder), "--budget-tokens", str(TOKENS), "--max-new-tokens", "6"),
        *("--drafter", f"draft_model:{tiny_target_dir}", "--suite", str(tmp_path / "mine.jsonl")),
        *("--output", str(tmp_path / "out")),
    ]


def gib(share: float) -> str:
    """Return a budget: the embeddings, keys and values of TOKENS, and this share of the layers."""
    layer, ends = 4 * (3 * 32 * 2048 + 3 * 32 * 32), 4 * 2 * 300 * 32
    return str((ends + 4 * 6 * 2 * 16 * TOKENS + share * 6 * layer) / GIB)


def test_an_evaluation_counts_what_was_read_and_prints_the_plan(command: list[str], tmp_path: Path) -> None:
    arguments = ["eval", *command, "--repeats", "1", "--profile-prompts", "1", "--memory-budget-gib", gib(0.6)]
    result = invoke(arguments)
    assert result.exit_code == 0, result.output
    assert "6 layers: " in result.output, "the line at load"
    assert "GB/tok" in result.output
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["lossless"] for row in rows] == [True, True]
    assert all(row["read_gb_per_token"] > 0 and row["budget"]["read_gbs"] > 0 for row in rows)
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert all(record["streaming"]["passes"] >= 1 for record in records)
    info = json.loads((tmp_path / "out" / "run.json").read_text())
    assert info["config"]["target"]["form"] == "streamed"
    assert info["roofline"]["streamed"]
    # Another budget is another evaluation; the same one resumes.
    assert invoke(arguments).exit_code == 0
    result = invoke([*arguments[:-1], gib(0.8)])
    assert result.exit_code != 0
    assert "memory_budget" in result.message


@pytest.mark.slow
def test_tuning_works_on_a_streamed_target(command: list[str], tmp_path: Path) -> None:
    options = ["--no-write", "--setting", "{length: 2}", "--memory-budget-gib", gib(0.6)]
    result = invoke(["tune", *command, *options])
    assert result.exit_code == 0, result.output
    place = json.loads((tmp_path / "out" / "tuning.json").read_text())["place"]
    assert place["form"].startswith("streamed 0.00"), "the budget is part of the setup that a choice is for"
