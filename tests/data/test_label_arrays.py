"""Index tensors of a batch's labels, against loops over its tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.data.collate import collate
from outrider.data.label_arrays import BatchIndexes
from outrider.data.types import UNKNOWN, DistilledExample, DrafterBatch, Example
from outrider.models.drafters.branches import Branches
from outrider.models.drafters.labels import Labels

LENGTHS = (9, 4, 7, 5)


def make_batch(horizon: int, *, packing: bool, max_positions: int | None = 12) -> DrafterBatch:
    """Collate texts whose continuations follow them for some tokens, and then may stop."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for row, length in enumerate(LENGTHS):
        text = torch.randint(3, (length,), generator=generator)
        example = Example(id=str(row), input_ids=text, loss_mask=torch.arange(length) >= 1)
        ahead = torch.arange(length)[:, None] + 1 + torch.arange(horizon)
        continuations = text[ahead.clamp(max=length - 1)]
        other = torch.rand(continuations.shape, generator=generator)
        continuations = torch.where(other < 0.2, 3, continuations)
        unknown = (other > 0.9).cumsum(1).bool()
        unknown[:, 0] = False
        examples.append(DistilledExample(example=example, continuations=continuations.masked_fill(unknown, UNKNOWN)))
    return collate(
        examples,
        max_positions=max_positions,
        generator=generator,
        labels="distilled",
        pad_id=0,
        packing=packing,
    )


def by_loops(batch: DrafterBatch) -> dict[str, list[Any]]:
    """Return the indexes of a batch by their definitions, token by token."""
    num_rows, seq = batch.input_ids.shape
    starts = torch.zeros_like(batch.input_ids) if batch.starts is None else batch.starts
    found: dict[str, list[Any]] = {
        name: [] for name in ("previous", "tokens", "known", "text_index", "on_text", "positions", "index", "depth")
    }
    columns: list[list[int]] = []
    for row in range(num_rows):
        columns.append([])
        for column in range(seq):
            if not batch.positions[row, column]:
                continue
            columns[-1].append(column)
            continuation = batch.continuations[row, column].tolist()
            num_depths = len(continuation) - 1
            known = [UNKNOWN not in continuation[: depth + 2] for depth in range(num_depths)]
            on_text = []
            for depth in range(num_depths):
                ahead = column + 1 + depth
                inside = ahead < seq and batch.attention_mask[row, ahead] and starts[row, ahead] == starts[row, column]
                same = bool(inside) and batch.input_ids[row, ahead] == continuation[depth]
                on_text.append(bool(same) and all(on_text))
            first = len(found["known"]) * num_depths
            found["index"] += [first + depth for depth in range(num_depths) if known[depth]]
            found["depth"] += [depth for depth in range(num_depths) if known[depth]]
            found["previous"].append(continuation[:-1])
            found["tokens"].append(continuation[1:])
            found["known"].append(known)
            found["on_text"].append(on_text)
            found["text_index"].append([row * seq + min(column + 1 + depth, seq - 1) for depth in range(num_depths)])
            found["positions"].append(row * seq + column)
    width = max(len(row) for row in columns)
    found["columns"] = [row + [0] * (width - len(row)) for row in columns]
    found["branch_index"] = [row * width + branch for row in range(num_rows) for branch in range(len(columns[row]))]
    if batch.starts is not None:
        found["starts"] = [
            [int(starts[row, column]) for column in columns[row]] + [0] * (width - len(columns[row])) for row in range(num_rows)
        ]
    return found


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("horizon", [2, 4])
def test_a_collated_batch_carries_every_index_of_its_loss(horizon: int, packing: bool) -> None:
    batch = make_batch(horizon, packing=packing)
    assert batch.indexes is not None
    carried = {name: tensor.tolist() for name, tensor in batch.indexes.bundle.tensors().items()}
    expected = by_loops(batch)
    assert len(expected["positions"]) == 12
    assert carried == expected
    # Its labels on the text, next to each other where they follow the same token of the text.
    text_index, on_text = torch.tensor(expected["text_index"]).flatten(), torch.tensor(expected["on_text"]).flatten()
    labels = [label for label, index in enumerate(expected["index"]) if on_text[index]]
    labels.sort(key=lambda label: int(text_index[expected["index"][label]]))
    assert batch.indexes.labels.in_text.tolist() == labels
    assert 0 < len(labels) < len(expected["index"])


def test_labels_and_branches_are_views_of_what_the_batch_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(4, packing=True)
    monkeypatch.setattr(BatchIndexes, "of", None)  # the loss makes none
    batch = batch.to(torch.device("cpu"))
    assert batch.indexes is not None
    memory = batch.indexes.bundle.buffer.untyped_storage().data_ptr()
    labels, branches = Labels.of(batch), Branches.of(batch)
    of_loss = [labels.tokens, labels.text_index, labels.known_labels.index, labels.known_labels.depth, branches.columns]
    assert {tensor.untyped_storage().data_ptr() for tensor in of_loss} == {memory}
    assert labels.first(3) is labels
    assert labels.first(1).known_labels.index.tolist() == labels.known[:, 0].nonzero()[:, 0].tolist()


def test_other_positions_have_indexes_of_their_own() -> None:
    batch = make_batch(4, packing=False, max_positions=None)
    positions = batch.positions.clone()
    positions[0] = False
    changed = replace(batch, positions=positions)
    for other in (changed, changed.to(torch.device("cpu")), batch.at(positions.numpy())):
        assert {name: tensor.tolist() for name, tensor in other.label_indexes.bundle.tensors().items()} == by_loops(other)
        assert len(Labels.of(other).positions) == int(positions.sum()) < int(batch.positions.sum())
    assert changed.to(torch.device("cpu")).indexes is not None
