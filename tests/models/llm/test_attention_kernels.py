"""Attention with its log-sum-exp along CUDA's code path, with kernels that check what CUDA's check."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.distill.label import branch_attention
from outrider.models.drafters.branches import Entries, Slots, attend_densely
from outrider.models.llm import split_attention

from . import efficient_attention

BATCH, HEADS, SEQ, BRANCHES, WIDTH = 2, 4, 13, 5, 8
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
"""Largest relative error of a whole tensor."""


@pytest.fixture
def cuda_path() -> Iterator[None]:
    with efficient_attention.on_cpu():
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def gradients_of(output: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad((output * randn(*output.shape)).sum(), leaves)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_branches_in_training_get_the_outputs_and_gradients_of_one_softmax(dtype: torch.dtype, kv_heads: int) -> None:
    shapes = [(HEADS, BRANCHES), *[(kv_heads, SEQ)] * 2, *[(kv_heads, BRANCHES)] * 6]
    leaves = [randn(BATCH, *shape, WIDTH, dtype=dtype).requires_grad_() for shape in shapes]
    query, *others = leaves
    text, *own = list(zip(others[::2], others[1::2], strict=True))
    seen = torch.arange(SEQ) < torch.tensor([0, 1, 5, 12, 13])[:, None]  # the first branch sees nothing of the text
    seen = seen.expand(BATCH, 1, -1, -1)
    # The same numbers in float64, in one softmax.
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wide_text, *wide_own = list(zip(wide[1::2], wide[2::2], strict=True))
    expected = attend_densely(wide[0], wide_text, wide_own, seen, 0.3)
    expected_gradients = gradients_of(expected, wide)
    with efficient_attention.on_cpu():
        actual = Entries(text, own).attend(query, seen, 0.3)
        gradients = gradients_of(actual, leaves)
    for ours, theirs in zip((actual, *gradients), (expected, *expected_gradients), strict=True):
        assert (ours.double() - theirs).norm() <= TOLERANCE[dtype] * theirs.norm()
        assert theirs.norm() > 0


@pytest.mark.usefixtures("cuda_path")
def test_slots_of_a_block_get_the_outputs_of_one_softmax() -> None:
    num_slots, branches = 3, 4
    query = randn(BATCH, HEADS, num_slots * branches, WIDTH)
    text, own = ((randn(BATCH, 2, size, WIDTH), randn(BATCH, 2, size, WIDTH)) for size in (SEQ, num_slots * branches))
    seen = (torch.arange(SEQ) < torch.tensor([2, 5, 9, 13])[:, None]).repeat(num_slots, 1).expand(BATCH, 1, -1, -1)
    slots = Slots(text, num_slots)
    slots.update(*own, 0)
    expected = attend_densely(query, text, [own], seen, 0.3, num_slots=num_slots)
    torch.testing.assert_close(slots.attend(query, seen, 0.3), expected)


@pytest.mark.usefixtures("cuda_path")
@pytest.mark.parametrize("num_keys", [1, 8, 13])
def test_branches_in_labelling_get_the_output_of_plain_operations(num_keys: int) -> None:
    query, key, value = randn(HEADS, 6, WIDTH), randn(2, num_keys, WIDTH), randn(2, num_keys, 16)
    mask = torch.zeros(6, num_keys).masked_fill_(torch.arange(num_keys) > torch.arange(6)[:, None], float("-inf"))
    assert split_attention.has_kernel(query, value)
    prepared = split_attention.prepare_mask(mask[None, None], HEADS, 2)
    actual = branch_attention.attention_by_kernel(query, key, value, prepared, 0.4)
    for ours, theirs in zip(actual, branch_attention.attention_with_lse(query, key, value, mask, 0.4), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_pytorchs_operators_take_these_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device `meta` an operator checks its arguments, and computes shapes only."""
    monkeypatch.setattr(split_attention, "on_cuda", lambda tensor: True)
    query, key = (torch.empty(BATCH, heads, size, WIDTH, device="meta") for heads, size in ((HEADS, BRANCHES), (2, SEQ)))
    mask = split_attention.prepare_mask(torch.empty(BATCH, 1, BRANCHES, SEQ, device="meta"), HEADS, 2)
    output, lse = split_attention.attention(query, key, key, mask, 0.3)
    assert (output.shape, lse.shape) == (query.shape, query.shape[:3])
    gradients: Any = split_attention.attention_gradient(output, query, key, key, mask, output, lse, 0.3)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize(
    ("dtype", "widths", "expected"),
    [
        (torch.bfloat16, (64, 128), True),
        (torch.float32, (8, 8), True),
        (torch.float64, (8, 8), False),
        (torch.bfloat16, (12, 8), False),
        (torch.bfloat16, (8, 12), False),
    ],
)
@pytest.mark.usefixtures("cuda_path")
def test_what_the_kernel_does_not_take_is_computed_by_plain_operations(dtype, widths, expected):
    assert split_attention.has_kernel(*(torch.empty(1, width, dtype=dtype) for width in widths)) == expected


def test_the_imitated_kernel_refuses_what_the_real_one_refuses() -> None:
    query, key = randn(1, 2, 3, WIDTH), randn(1, 2, 5, WIDTH)
    forward = efficient_attention.forward
    with pytest.raises(AssertionError, match="attn_bias is not correctly aligned"):
        forward(query, key, key, torch.zeros(1, 1, 3, 5).expand(1, 2, 3, 5), True)
    with pytest.raises(AssertionError, match="no grouped heads"):
        forward(query, key[:, :1], key[:, :1], torch.zeros(1, 2, 3, 8)[..., :5], True)
