"""Chunks of a loss: their size by device, and a trained head's casts under autocast."""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.models.drafters import scoring
from outrider.models.drafters.scoring import (
    CHUNK_SHARE,
    MAX_CHUNK,
    LabelRows,
    SharedCasts,
    against_label,
    max_chunk,
    per_label_loss,
)

VOCAB, WIDTH, NUM_LABELS = 48, 8, 16


class OperatorsOfHead(TorchDispatchMode):
    """Counts the casts and additions of tensors of a head's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.shape == (VOCAB, WIDTH):
            self.counts[function.overloadpacket._qualified_op_name] += 1
        return output


def trained(num_chunks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor, Counter[str]]:
    """Return loss, the head's gradient and the operators on tensors of its shape."""
    torch.manual_seed(0)
    head, states = nn.Linear(WIDTH, VOCAB, bias=False), torch.randn(NUM_LABELS, WIDTH, requires_grad=True)
    inside, text = torch.ones(NUM_LABELS, dtype=torch.bool), torch.zeros(NUM_LABELS, dtype=torch.long)
    rows = LabelRows(torch.randint(VOCAB, (NUM_LABELS,)), inside, text, (states,))
    monkeypatch.setattr(scoring, "max_chunk", lambda device: NUM_LABELS // num_chunks * VOCAB)
    with OperatorsOfHead() as operators:
        with torch.autocast("cpu", torch.bfloat16):
            losses = per_label_loss(partial(against_label, head), rows, VOCAB)
        losses.loss.sum().backward()
    assert head.weight.grad is not None
    return losses.loss.detach(), head.weight.grad, operators.counts


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 8])
def test_a_trained_head_and_its_gradient_are_cast_once_for_all_chunks(num_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, gradient, counts = trained(num_chunks, monkeypatch)
    assert counts["aten::_to_copy"] == 2
    assert counts["aten::add"] == num_chunks - 1
    monkeypatch.setattr(SharedCasts, "shared", lambda self, function: function)
    expected_loss, expected_gradient, counts = trained(num_chunks, monkeypatch)
    assert counts["aten::_to_copy"] == (2 if num_chunks == 1 else 2 + num_chunks), "autocast alone"
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected_gradient)


def test_weights_that_autocast_does_not_cast_are_left_alone() -> None:
    frozen, narrow = nn.Linear(3, 2).requires_grad_(False), nn.Linear(3, 2).bfloat16()
    casts = SharedCasts()
    call = casts.shared(lambda layer, states: layer(states))
    states = torch.ones(1, 3)
    assert call(nn.Linear(3, 2), states).dtype == torch.float32, "autocast is off"
    with torch.autocast("cpu", torch.bfloat16):
        for layer in (frozen, narrow):
            assert torch.equal(call(layer, states), layer(states))
    assert not casts._casts


def test_a_chunk_grows_with_a_cards_memory_and_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def logits(gib: float) -> int:
        properties = SimpleNamespace(total_memory=int(gib * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return max_chunk(torch.device("cuda"))

    assert max_chunk(torch.device("cpu")) == MAX_CHUNK
    assert logits(CHUNK_SHARE) == 2**28
    assert logits(8) == MAX_CHUNK
