"""What is told before a distillation against what it then takes."""

import json
from collections import Counter
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
from outrider.distill.label.run import load_examples, missing_examples
from outrider.distill.regenerate.run import missing_conversations, regenerate
from outrider.models.target.config import TargetConfig
from outrider.models.target.hf_target import HFTarget
from outrider.models.target.loading import load_target

from .label.test_run import run, write_conversations


@pytest.fixture
def target(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu"))


@pytest.mark.parametrize("features", ["none", "last_hidden"])
def test_the_counts_are_those_of_the_run(features: str, target: HFTarget, tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "chats.jsonl", 60)
    config = DistillConfig(horizon=4, features=features, shard_examples=16, batch_tokens=128)
    examples, dropped = load_examples(data, target.tokenizer)
    told = estimate(config, target, examples, dropped, tmp_path / "distill", num_processes=1)
    manifest = run(config, data, target, tmp_path / "distill")
    statistics = read_json(tmp_path / "distill" / "stats.json")
    assert told.num_examples == statistics["num_examples"] > 50
    assert told.num_shards == len(manifest.shards) == 4
    assert told.num_tokens == told.sampled_tokens == statistics["num_text_tokens"]  # so few that the sample is the whole
    assert told.num_positions == statistics["num_positions"]
    assert told.agreement == pytest.approx(statistics["agreement"])
    assert told.num_forward_tokens == pytest.approx(statistics["num_text_tokens"] + statistics["num_branch_tokens"])
    assert told.num_bytes == manifest.num_tokens * bytes_per_token(config, target)
    # What a shard has besides, a header and offsets, doesn't grow with its texts.
    assert told.num_bytes < sum(shard.num_bytes for shard in manifest.shards) < told.num_bytes + 4 * 3000
    assert told.seconds == pytest.approx(told.num_tokens / told.tokens_per_second)
    assert told.free_bytes > 0


def test_the_last_process_to_finish_decides_the_time(target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "_measure", lambda *args: (Counter(num_branch_tokens=50), 100, 2.0))
    examples, dropped = load_examples(write_conversations(tmp_path / "chats.jsonl", 60), target.tokenizer)
    config = DistillConfig(horizon=4, shard_examples=-(-len(examples) // 5))
    told = estimate(config, target, examples, dropped, tmp_path, num_processes=2)
    assert told.num_shards == 5
    assert told.seconds == pytest.approx(told.num_tokens / 50 * 3 / 5)
    assert told.num_forward_tokens == pytest.approx(1.5 * told.num_tokens)


def test_a_disk_too_small_is_told(target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "bytes_per_token", lambda *args, **kwargs: 10**15)
    examples, dropped = load_examples(write_conversations(tmp_path / "chats.jsonl", 4), target.tokenizer)
    told = estimate(DistillConfig(horizon=2), target, examples, dropped, tmp_path / "not" / "there", num_processes=1)
    assert any("NOT ENOUGH" in str(cell) for cell in estimate_table(told).columns[1]._cells)
    assert json.dumps(told.dropped)


def test_regeneration_is_told_from_a_sample_that_is_the_whole(target: HFTarget, tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "chats.jsonl", 20)
    config = DistillConfig(mode="regenerate", horizon=3, max_new_tokens=8, shard_examples=7)
    conversations, dropped = load_conversations(data)
    told, examples = estimate_regeneration(config, data, target, conversations, dropped, num_processes=1)
    made = regenerate(config, data, target, tmp_path / "answers", Accelerator(cpu=True))
    statistics = read_json(tmp_path / "answers" / "stats.json")
    assert sorted(example.input_ids.tolist() for example in examples) == sorted(each.input_ids.tolist() for each in made)
    assert told.num_conversations == told.num_turns == 20
    assert told.num_sampled == statistics["num_answers"] > 10
    assert told.tokens_per_answer == pytest.approx(statistics["num_tokens"] / statistics["num_answers"])
    assert told.cut_share == pytest.approx(statistics["cut_share"])
    assert told.seconds == pytest.approx(statistics["num_tokens"] / told.tokens_per_second)


def test_of_many_conversations_a_sample_is_answered(target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(estimate_module, "MEASURED_CONVERSATIONS", 10)
    data = write_conversations(tmp_path / "chats.jsonl", 40)
    config = DistillConfig(mode="regenerate", horizon=3, max_new_tokens=8, shard_examples=10)
    conversations, dropped = load_conversations(data)
    told, examples = estimate_regeneration(config, data, target, conversations, dropped, num_processes=3)
    assert 0 < told.num_sampled <= 10
    assert len(examples) == 4 * told.num_sampled
    # Two of four shards are one process's.
    assert told.seconds == pytest.approx(2 * told.num_sampled * told.tokens_per_answer / told.tokens_per_second)


def test_only_what_is_missing_is_planned(target: HFTarget, tmp_path: Path) -> None:
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
