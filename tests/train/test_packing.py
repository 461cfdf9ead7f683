"""Packing: several texts in a row give the losses and gradients of separate rows."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.shards import label_store
from outrider.data.types import DrafterBatch
from outrider.models.drafters import build_drafter, eagle, parse_drafter
from outrider.models.drafters.labels import Labels
from outrider.models.drafters.losses import LossKind
from outrider.models.drafters.objective import Loss, Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.train.batches import BatchStream, require_packing, states_of_texts, target_reads, with_hidden_states
from outrider.train.config import TrainConfig
from outrider.train.records import read_records

from .conftest import DRAFTER, Run

RunTrain = Callable[..., Run]
KINDS: list[dict[str, Any]] = [
    DRAFTER,
    {"kind": "medusa", "num_heads": 3},
    {"kind": "eagle", "feature_noise": 0.0},
    {"kind": "eagle3", "feature_layers": [0, 1]},
    {"kind": "draft_model", "init": "target_layers", "num_layers": 1},
]


def make_batch(shards_dir: Path, *, packing: bool, **options: Any) -> DrafterBatch:
    config = TrainConfig(steps=10, batch_size=6, packing=packing, **options)
    stream = BatchStream(shards_dir, label_store(shards_dir).load(), config, rank=0, num_processes=1)
    return stream.batches(0)[0]


def leave_the_text(batch: DrafterBatch) -> DrafterBatch:
    """Replace continuations by the start of the next text in the row.

    These tokens must not count as tokens of the text itself.
    """
    continuations = batch.continuations.clone()
    beyond = batch.input_ids.roll(-1, 1)
    ends = batch.positions & (batch.starts.roll(-2, 1) != batch.starts)
    continuations[ends, 1] = beyond.roll(-1, 1)[ends]
    return replace(batch, continuations=continuations)


def by_text(batch: DrafterBatch, values: torch.Tensor) -> dict[tuple[int, ...], torch.Tensor]:
    """Map the tokens of each text to the values at these tokens."""
    starts = torch.zeros_like(batch.input_ids) if batch.starts is None else batch.starts
    values_of_texts = {}
    for row, mask in enumerate(batch.attention_mask):
        for start in starts[row][mask].unique().tolist():
            is_of_text = mask & (starts[row] == start)
            values_of_texts[tuple(batch.input_ids[row, is_of_text].tolist())] = values[row, is_of_text]
    return values_of_texts


def test_the_same_texts_labels_and_positions_in_fewer_tokens(shards_dir: Path) -> None:
    apart, together = (make_batch(shards_dir, packing=packing, max_positions=40) for packing in (False, True))
    assert together.input_ids.numel() < 0.8 * apart.input_ids.numel()
    assert len(together.input_ids) < len(apart.input_ids)
    assert int(together.positions.sum()) == 40
    for name in ("positions", "continuations"):
        expected, actual = (by_text(batch, getattr(batch, name)) for batch in (apart, together))
        assert len(expected) == 6
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[text], actual[text]) for text in expected), "the draw doesn't depend on the rows"
    positions = by_text(together, together.position_ids)
    assert all(values.tolist() == list(range(len(text))) for text, values in positions.items())


def test_states_of_packed_texts_equal_those_of_each_text_alone(shards_dir: Path, target: HFTarget) -> None:
    apart, together = (make_batch(shards_dir, packing=packing) for packing in (False, True))
    alone = by_text(apart, states_of_texts(target, apart, last=True, layers=())[0])
    hidden, features = states_of_texts(target, together, last=True, layers=(1, 0))
    packed = by_text(together, hidden)
    assert len(packed) == 6
    for text, states in packed.items():
        torch.testing.assert_close(states, alone[text], rtol=1e-4, atol=1e-5)
    only = states_of_texts(target, together, last=False, layers=(1, 0))
    assert only[0] is None
    assert torch.equal(only[1], features)


@pytest.mark.parametrize(
    ("options", "loss"), list(zip(KINDS, cycle(["kl", "cross_entropy"]), strict=False)), ids=lambda value: str(value)
)
def test_losses_and_gradients_equal_those_of_the_padded_batch(options, loss, shards_dir, target, monkeypatch):
    monkeypatch.setattr(eagle, "MEASURED_EVERY", 1)  # which positions it counts depends on the rows
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter(options), target).train()
    objective = Objective(loss=LossKind(loss), head=target.head)
    reads = target_reads(drafter, objective)

    def run(batch: DrafterBatch) -> tuple[Loss, list[torch.Tensor]]:
        drafter.zero_grad()
        result = drafter.loss(with_hidden_states(batch, target, reads), objective)
        result.sums.sum().backward()
        return result, [parameter.grad.clone() for parameter in drafter.parameters() if parameter.grad is not None]

    (expected, gradients), (actual, ours) = (run(make_batch(shards_dir, packing=packing)) for packing in (False, True))
    torch.testing.assert_close(actual.sums, expected.sums, rtol=1e-4, atol=1e-4)
    for name in ("counts", "hits", "joint_hits"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert len(ours) == len(gradients) >= 4
    for ours_, theirs in zip(ours, gradients, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-3, atol=1e-3 * max(1.0, float(theirs.abs().max())))


def test_a_continuation_never_continues_in_the_next_text(shards_dir: Path) -> None:
    batch = leave_the_text(make_batch(shards_dir, packing=True))
    labels = Labels.of(batch)
    row, column = batch.positions.nonzero(as_tuple=True)
    num_crossing = 0
    for index, (r, c) in enumerate(zip(row.tolist(), column.tolist(), strict=True)):
        end = c + 1
        while end < batch.input_ids.shape[1] and batch.starts[r, end] == batch.starts[r, c] and batch.attention_mask[r, end]:
            end += 1
        beyond = [depth for depth in range(labels.tokens.shape[1]) if c + 1 + depth >= end]
        assert not labels.on_text[index, beyond].any()
        num_crossing += bool(beyond)
    assert num_crossing > 3


def test_training_on_packed_rows_learns_the_same(run_train: RunTrain) -> None:
    def losses(run: Run) -> list[float]:
        return [record["loss"] for record in read_records(run.train_dir / "metrics.jsonl")]

    apart, together = run_train("apart"), run_train("together", packing=True)
    assert losses(together) == pytest.approx(losses(apart), rel=1e-4)


def test_a_target_that_would_read_across_texts_is_refused(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    require_packing(target)
    read_texts = target.read_texts

    def blind(layers: tuple[int, ...] = (), **inputs: Any) -> Any:
        inputs.pop("position_ids", None)
        return read_texts(layers, **inputs)

    monkeypatch.setattr(target, "read_texts", blind)
    with pytest.raises(ValueError, match=r"Llama.* reads texts differently.*packed into one row.*train\.packing=false"):
        require_packing(target)
