"""What a resumed distillation still has to do, which its plan counts."""

from dataclasses import replace
from pathlib import Path

import pytest
from accelerate import Accelerator

from outrider.data.sources import load_conversations
from outrider.distill.config import DistillConfig
from outrider.distill.label.run import load_examples, missing_examples
from outrider.distill.regenerate.run import missing_conversations, regenerate
from outrider.models.llm.hf_target import HFTarget

from .label.test_run import run, write_conversations


def test_only_missing_shards_are_left(target: HFTarget, tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "chats.jsonl", 20)
    config = DistillConfig(horizon=3, shard_examples=6)
    examples, _ = load_examples(data, target)
    folder = tmp_path / "distill"
    assert missing_examples(config, data, target, examples, folder) == examples
    run(config, data, target, folder)
    assert missing_examples(config, data, target, examples, folder) == []
    (folder / "shard-00001.json").unlink()
    assert missing_examples(config, data, target, examples, folder) == examples[6:12]
    with pytest.raises(ValueError, match="another run"):
        missing_examples(replace(config, horizon=4), data, target, examples, folder)
    regenerating = DistillConfig(engine="decoder", horizon=3, max_new_tokens=8, shard_examples=7)
    conversations, _ = load_conversations(data)
    regenerate(regenerating, data, target, tmp_path / "answers", Accelerator(cpu=True))
    (tmp_path / "answers" / "answers-00000.json").unlink()
    assert missing_conversations(regenerating, data, target, conversations, tmp_path / "answers") == conversations[:7]
    with pytest.raises(ValueError, match="another run"):
        missing_conversations(replace(regenerating, max_new_tokens=9), data, target, conversations, tmp_path / "answers")
