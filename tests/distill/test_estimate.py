"""The estimate before a distillation, against the counts of the run."""

from dataclasses import replace
from pathlib import Path

import pytest
from accelerate import Accelerator

from outrider.data.files import read_json
from outrider.data.sources import load_conversations
from outrider.distill import estimate as estimate_module
from outrider.distill.config import DistillConfig
from outrider.distill.estimate import estimate, estimate_regeneration, estimate_table
from outrider.distill.label.features import bytes_per_token
from outrider.distill.label.run import LabellingStats, load_examples, missing_examples
from outrider.distill.regenerate.run import missing_conversations, regenerate
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from .label.test_run import run, write_conversations

SAMPLE = LabellingStats(num_text_tokens=100, num_positions=80, num_agreeing=40, num_branch_tokens=50, seconds=2.0)


@pytest.fixture
def target(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu"))


@pytest.mark.parametrize("features", ["none", "last_hidden"])
def test_the_estimated_counts_equal_those_of_the_run(features: str, target: HFTarget, tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "chats.jsonl", 60)
    config = DistillConfig(horizon=4, features=features, shard_examples=16, batch_tokens=128)
    examples, dropped = load_examples(data, target.tokenizer)
    estimated = estimate(config, target, examples, dropped, tmp_path / "distill", num_processes=1)
    manifest = run(config, data, target, tmp_path / "distill")
    statistics = read_json(tmp_path / "distill" / "stats.json")
    assert estimated.num_examples == statistics["num_examples"] > 50
    assert estimated.num_shards == len(manifest.shards) == 4
    assert (
        estimated.num_tokens == estimated.sample.num_text_tokens == statistics["num_text_tokens"]
    )  # with so few texts the sample is the whole
    assert estimated.num_positions == statistics["num_positions"]
    assert estimated.sample.agreement == pytest.approx(statistics["agreement"])
    assert estimated.num_forward_tokens == pytest.approx(statistics["num_text_tokens"] + statistics["num_branch_tokens"])
    assert estimated.num_bytes == manifest.num_tokens * bytes_per_token(config, target.hidden_size)
    # A shard also has a header and offsets, whose size doesn't grow with its texts.
    assert estimated.num_bytes < sum(shard.num_bytes for shard in manifest.shards) < estimated.num_bytes + 4 * 3000
    assert estimated.seconds == estimated.sample.seconds
    assert estimated.free_bytes > 0


def test_the_last_process_to_finish_decides_the_time(target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "_measure", lambda *args: SAMPLE)
    examples, dropped = load_examples(write_conversations(tmp_path / "chats.jsonl", 60), target.tokenizer)
    config = DistillConfig(horizon=4, shard_examples=-(-len(examples) // 5))
    estimated = estimate(config, target, examples, dropped, tmp_path, num_processes=2)
    assert estimated.num_shards == 5
    assert estimated.seconds == pytest.approx(estimated.num_tokens / 50 * 3 / 5)
    assert estimated.num_forward_tokens == pytest.approx(1.5 * estimated.num_tokens)


def test_a_too_small_disk_is_shown_in_the_estimate(target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "num_bytes", lambda *args: 10**18)
    examples, dropped = load_examples(write_conversations(tmp_path / "chats.jsonl", 4), target.tokenizer)
    estimated = estimate(DistillConfig(horizon=2), target, examples, dropped, tmp_path / "not" / "there", num_processes=1)
    assert any("NOT ENOUGH" in str(cell) for cell in estimate_table(estimated).columns[1]._cells)


def test_the_estimate_of_regeneration_from_all_conversations_equals_the_run(target: HFTarget, tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "chats.jsonl", 20)
    config = DistillConfig(mode="regenerate", horizon=3, max_new_tokens=8, shard_examples=7)
    conversations, dropped = load_conversations(data)
    estimated, examples = estimate_regeneration(config, data, target, conversations, dropped, num_processes=1)
    regenerated = regenerate(config, data, target, tmp_path / "answers", Accelerator(cpu=True))
    statistics = read_json(tmp_path / "answers" / "stats.json")
    assert sorted(example.input_ids.tolist() for example in examples) == sorted(
        example.input_ids.tolist() for example in regenerated
    )
    assert estimated.num_conversations == estimated.num_turns == 20
    assert estimated.num_sampled == statistics["num_answers"] > 10
    assert estimated.tokens_per_answer == pytest.approx(statistics["num_tokens"] / statistics["num_answers"])
    assert estimated.cut_share == pytest.approx(statistics["cut_share"])
    assert estimated.seconds == pytest.approx(statistics["num_tokens"] / estimated.tokens_per_second)


def test_the_estimate_answers_only_a_sample_of_many_conversations(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(estimate_module, "MEASURED_CONVERSATIONS", 10)
    data = write_conversations(tmp_path / "chats.jsonl", 40)
    config = DistillConfig(mode="regenerate", horizon=3, max_new_tokens=8, shard_examples=10)
    conversations, dropped = load_conversations(data)
    estimated, examples = estimate_regeneration(config, data, target, conversations, dropped, num_processes=3)
    assert 0 < estimated.num_sampled <= 10
    assert len(examples) == 4 * estimated.num_sampled
    # One of three processes has two of the four shards.
    assert estimated.seconds == pytest.approx(
        2 * estimated.num_sampled * estimated.tokens_per_answer / estimated.tokens_per_second
    )


def test_only_missing_shards_are_planned(target: HFTarget, tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "chats.jsonl", 20)
    config = DistillConfig(horizon=3, shard_examples=6)
    examples, _ = load_examples(data, target.tokenizer)
    folder = tmp_path / "distill"
    assert missing_examples(config, data, target, examples, folder) == examples
    run(config, data, target, folder)
    assert missing_examples(config, data, target, examples, folder) == []
    (folder / "shard-00001.json").unlink()
    assert missing_examples(config, data, target, examples, folder) == examples[6:12]
    with pytest.raises(ValueError, match="another run"):
        missing_examples(replace(config, horizon=4), data, target, examples, folder)
    regenerating = DistillConfig(mode="regenerate", horizon=3, max_new_tokens=8, shard_examples=7)
    conversations, _ = load_conversations(data)
    regenerate(regenerating, data, target, tmp_path / "answers", Accelerator(cpu=True))
    (tmp_path / "answers" / "answers-00000.json").unlink()
    assert missing_conversations(regenerating, data, target, conversations, tmp_path / "answers") == conversations[:7]
    with pytest.raises(ValueError, match="another run"):
        missing_conversations(replace(regenerating, max_new_tokens=9), data, target, conversations, tmp_path / "answers")
