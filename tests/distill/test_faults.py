"""Killed processes: nothing is lost, duplicated or recomputed, and no byte differs."""

import random
from pathlib import Path

import pytest
from accelerate import Accelerator

from outrider.data.shards import verify_shards
from outrider.distill.regenerate.answers import answer_store
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ..forks import result_of
from . import killed_distill
from .killed_distill import make
from .label.test_run import contents, write_conversations

NUM_KILLS = 10
NUM_CONVERSATIONS, NUM_SHARDS = 120, 66
"""The kills happen while the first NUM_SHARDS shards of answers and labels are written."""


@pytest.fixture
def target(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu"))


@pytest.mark.slow
def test_processes_killed_repeatedly_write_the_bytes_of_an_uninterrupted_run(target, tiny_target_dir, tmp_path):
    data = write_conversations(tmp_path / "chats.jsonl", NUM_CONVERSATIONS)
    seed = random.randrange(10**6)
    options = (tmp_path / f"killed-{seed}", NUM_SHARDS, NUM_KILLS, seed)
    attempts = result_of(killed_distill.main, tiny_target_dir, data, *options, ACCELERATE_USE_CPU="true")
    assert len(attempts) == NUM_KILLS
    # On a fast machine an attempt may end before the signal.
    assert sum(attempt["killed"] for attempt in attempts) > NUM_KILLS - 3
    # Shards that were finished before a kill are not recomputed.
    assert all(attempt["kept"] for attempt in attempts)
    counts = [attempt["num_finished"] for attempt in attempts]
    assert counts == sorted(counts)
    whole, killed = tmp_path / "whole", options[0]
    manifest = make(target, data, whole, Accelerator(cpu=True))
    answers = answer_store(whole / "answers").load()
    assert counts[0] < len(answers.shards) < counts[-1], "the kills came in both parts"
    verify_shards(killed / "distill", manifest)
    ids = [id for shard in manifest.shards for id in shard.ids]
    assert len(ids) == len(set(ids)) > 100
    for part in ("answers", "distill"):
        assert contents(killed / part) == contents(whole / part)
