"""The order of texts, their division into batches, and resuming within an epoch."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.shards import label_store, read_shard
from outrider.data.types import DistilledExample
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters.objective import Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.train import batches as train_data
from outrider.train.batches import BatchStream, count_label_tokens, epoch_order, label_counts
from outrider.train.config import TrainConfig

from .conftest import DRAFTER, write_shards


def make_stream(shards_dir: Path, *, rank: int = 0, num_processes: int = 1, **options: Any) -> BatchStream:
    config = TrainConfig(**{"steps": 100, "batch_size": 4, "shuffle_shards": 2, **options})
    return BatchStream(shards_dir, label_store(shards_dir).load(), config, rank=rank, num_processes=num_processes)


def texts(stream: BatchStream, step: int) -> list[tuple[int, ...]]:
    """List the texts that a process reads in a step, without padding."""
    return [
        tuple(row[mask].tolist())
        for batch in stream.batches(step)
        for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]


def test_batches_made_ahead_are_the_same_and_end_with_the_training(shards_dir: Path) -> None:
    plain, manifest = make_stream(shards_dir, steps=4), label_store(shards_dir).load()
    ahead = BatchStream(shards_dir, manifest, plain.config, rank=0, num_processes=1, ahead=True)
    for step in (0, 1, 2, 3, 1):  # the last one wasn't expected
        for ours, theirs in zip(ahead.batches(step), plain.batches(step), strict=True):
            for name in ("input_ids", "positions", "continuations"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), (step, name)
    assert ahead._next is not None
    assert ahead._next[0] == 2
    ahead.batches(3)
    assert ahead._next is None, "a step after the last one was made"


def test_an_error_of_the_thread_is_raised_where_its_batches_are_needed(shards_dir, monkeypatch):
    config = TrainConfig(steps=9, batch_size=4)
    stream = BatchStream(shards_dir, label_store(shards_dir).load(), config, rank=0, num_processes=1, ahead=True)
    monkeypatch.setattr(stream, "_batches", lambda step: [] if step == 0 else 1 / 0)
    assert stream.batches(0) == []
    with pytest.raises(ZeroDivisionError):
        stream.batches(1)


def test_each_epoch_reads_every_text_once_in_another_order() -> None:
    sizes = (4, 4, 1, 3)
    orders = [[tuple(row) for row in epoch_order(sizes, 0, epoch, 2).tolist()] for epoch in range(3)]
    every = {(shard, row) for shard, size in enumerate(sizes) for row in range(size)}
    assert len(every) == 12
    for order in orders:
        assert len(order) == 12
        assert set(order) == every
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert epoch_order(sizes, 1, 0, 2).tolist() != epoch_order(sizes, 0, 0, 2).tolist()


def test_all_texts_of_a_window_of_shards_may_be_held_out() -> None:
    order = epoch_order((3, 1), 0, 0, 1, frozenset({(1, 0)}))
    assert sorted(order.tolist()) == [[0, 0], [0, 1], [0, 2]]


def test_texts_are_mixed_within_a_window_of_shards_only() -> None:
    order = epoch_order((8,) * 6, 3, 0, 2)[:, 0].tolist()
    windows = [set(order[start : start + 16]) for start in (0, 16, 32)]
    assert [len(window) for window in windows] == [2, 2, 2]
    assert set.union(*windows) == set(range(6))
    assert order[:16] != sorted(order[:16]), "shards of a window are read one after the other"


def test_a_step_reads_the_same_texts_for_any_division(shards_dir: Path, examples: list[DistilledExample]) -> None:
    whole = make_stream(shards_dir, batch_size=8)
    accumulated = make_stream(shards_dir, batch_size=2, gradient_accumulation=4)
    ranks = [make_stream(shards_dir, batch_size=2, gradient_accumulation=2, rank=rank, num_processes=2) for rank in (0, 1)]
    by_id = {example.example.id: tuple(example.example.input_ids.tolist()) for example in examples}
    seen: Counter[str] = Counter()
    for step in range(11):  # 88 texts: four epochs of 22
        expected = sorted(texts(whole, step))
        assert sorted(texts(accumulated, step)) == expected
        assert sorted(texts(ranks[0], step) + texts(ranks[1], step)) == expected
        assert sorted(by_id[id] for id in ranks[1].ids(step)) == expected
        seen.update(whole.ids(step))
    assert set(seen.values()) == {4}


def test_only_the_shards_of_a_window_are_read_and_each_once(shards_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()

    def spy(directory: Path, entry: Any, reads: Any) -> list[DistilledExample]:
        read[entry.file] += 1
        return read_shard(directory, entry, reads)

    monkeypatch.setattr(train_data, "read_shard", spy)
    make_stream(shards_dir).batches(4)  # texts 16 to 19 of 22, all of the third window of two shards
    assert 1 <= read.total() <= 2
    read.clear()
    stream = make_stream(shards_dir, batch_size=2)
    for step in range(11):
        stream.batches(step)
    assert len(read) == 6
    assert set(read.values()) == {1}, "a window is read once per epoch"


def test_sampled_positions_depend_on_process_step_and_seed_only(target, examples, tmp_path):
    longest = max(examples, key=lambda example: len(example.example.input_ids))
    # one text, so that only the sampled positions can differ
    shards_dir = write_shards(tmp_path, target.identity, [longest])

    def positions(rank: int = 0, step: int = 0, seed: int = 0) -> list[bool]:
        stream = make_stream(shards_dir, batch_size=1, max_positions=6, rank=rank, num_processes=2, seed=seed)
        (batch,) = stream.batches(step)
        assert int(batch.positions.sum()) == 6
        return batch.positions.flatten().tolist()

    first = positions()
    assert positions() == first
    assert all(other != first for other in (positions(rank=1), positions(step=1), positions(seed=1)))


def test_a_process_without_labels_still_has_gradients(shards_dir: Path, target: HFTarget) -> None:
    (batch,) = make_stream(shards_dir).batches(0)
    hidden = torch.randn(*batch.input_ids.shape, target.hidden_size)
    drafter = build_drafter(parse_drafter(DRAFTER), target)
    drafter.loss(
        replace(batch, hidden_states=hidden, positions=torch.zeros_like(batch.positions)), Objective()
    ).sums.sum().backward()
    gradients = [parameter.grad for parameter in drafter.parameters()]
    assert len(gradients) >= 4
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_counted_labels_are_those_that_a_drafter_counts(shards_dir: Path, target: HFTarget) -> None:
    drafter = build_drafter(parse_drafter(DRAFTER), target)
    for labels in ("distilled", "text"):
        (batch,) = make_stream(shards_dir, labels=labels).batches(0)
        hidden = torch.randn(*batch.input_ids.shape, target.hidden_size)
        loss = drafter.loss(replace(batch, hidden_states=hidden), Objective())
        counts = label_counts(batch)
        assert counts.tolist() == loss.counts.tolist()
        assert counts[0] > counts[-1] > 0


def test_label_tokens_are_counted_without_unknown_ones(shards_dir: Path, target: HFTarget) -> None:
    manifest = label_store(shards_dir).load()
    counts = count_label_tokens(shards_dir, manifest, target.vocab_size)
    known = sum(
        int((example.continuations >= 0).sum()) for entry in manifest.shards for example in read_shard(shards_dir, entry)
    )
    assert int(counts.sum()) == known > 1000
