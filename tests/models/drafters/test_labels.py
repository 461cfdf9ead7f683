"""Labels and branches of a batch, against loops over its tokens."""

from typing import Any

import pytest
import torch

from outrider.data.collate import collate
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
        packing=packing,
    )


def by_loops(batch: DrafterBatch) -> dict[str, list[Any]]:
    """Return the fields of a batch's labels and branches by their definitions, token by token."""
    num_rows, seq = batch.input_ids.shape
    starts = torch.zeros_like(batch.input_ids) if batch.starts is None else batch.starts
    found: dict[str, list[Any]] = {name: [] for name in ("previous", "tokens", "known", "text_index", "on_text", "positions")}
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
            found["previous"].append(continuation[:-1])
            found["tokens"].append(continuation[1:])
            found["known"].append(known)
            found["on_text"].append(on_text)
            found["text_index"].append([row * seq + min(column + 1 + depth, seq - 1) for depth in range(num_depths)])
            found["positions"].append(row * seq + column)
    width = max(len(row) for row in columns)
    found["columns"] = [row + [0] * (width - len(row)) for row in columns]
    found["index"] = [row * width + branch for row in range(num_rows) for branch in range(len(columns[row]))]
    if batch.starts is not None:
        found["starts"] = [
            [int(starts[row, column]) for column in columns[row]] + [0] * (width - len(columns[row])) for row in range(num_rows)
        ]
    return found


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("horizon", [2, 4])
def test_labels_and_branches_equal_those_of_loops_over_the_tokens(horizon: int, packing: bool) -> None:
    batch = make_batch(horizon, packing=packing)
    labels, expected = Labels.of(batch), by_loops(batch)
    branches = Branches.of(batch, labels.positions)
    assert len(labels.positions) == 12
    assert 0 < labels.on_text[labels.known].sum() < labels.known.sum() < labels.known.numel()
    for name, values in expected.items():
        assert getattr(labels if hasattr(labels, name) else branches, name).tolist() == values, name
    first = labels.first(1)
    assert (first.tokens.tolist(), first.known.tolist()) == (labels.tokens[:, :1].tolist(), labels.known[:, :1].tolist())
    assert labels.first(9).known.shape == labels.known.shape
    third = labels.every(3)
    assert (third.positions.tolist(), third.known.tolist()) == (labels.positions[::3].tolist(), labels.known[::3].tolist())
