"""Attention over a text and a branch in two parts, against one softmax over both."""

import pytest
import torch

from outrider.models.drafters.branches import Entries, Masks, attend_densely

BATCH, HEADS, SEQ, BRANCHES, WIDTH = 2, 4, 9, 5, 8


def make(num_own: int, kv_heads: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Make a query, keys and values of the text and `num_own` depths, and the text's mask.

    One branch attends to no token of the text.
    """
    generator = torch.Generator().manual_seed(num_own)
    shapes = [(HEADS, BRANCHES), *[(kv_heads, SEQ)] * 2, *[(kv_heads, BRANCHES)] * 2 * num_own]
    tensors = [torch.randn(BATCH, *shape, WIDTH, generator=generator, dtype=torch.float64) for shape in shapes]
    seen = torch.rand(BATCH, 1, BRANCHES, SEQ, generator=generator) < 0.5
    seen[0, 0, 0] = False
    return [tensor.requires_grad_() for tensor in tensors], seen


def pairs(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("num_own", [1, 4])
def test_outputs_and_gradients_are_those_of_one_softmax(num_own: int, kv_heads: int) -> None:
    (query, *others), seen = make(num_own, kv_heads)
    text, *branch_entries = pairs(others)
    actual = Entries(text, branch_entries).attend(query, seen, 0.3)
    expected = attend_densely(query, text, branch_entries, seen, 0.3)
    plain = []
    for branch in range(BRANCHES):  # plain attention, one branch at a time
        groups = HEADS // kv_heads
        keys = torch.cat([text[0], *(key[:, :, branch : branch + 1] for key, _ in branch_entries)], dim=2).repeat_interleave(
            groups, 1
        )
        values = torch.cat([text[1], *(value[:, :, branch : branch + 1] for _, value in branch_entries)], 2).repeat_interleave(
            groups, 1
        )
        scores = 0.3 * query[:, :, branch : branch + 1] @ keys.transpose(2, 3)
        visible = torch.nn.functional.pad(seen[:, :, branch : branch + 1], (0, num_own), value=True)
        scores = scores.masked_fill(~visible, -torch.inf)
        plain.append(scores.softmax(-1) @ values)
    torch.testing.assert_close(actual, torch.cat(plain, dim=2))
    torch.testing.assert_close(expected, torch.cat(plain, dim=2))
    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    gradients = torch.autograd.grad((actual * weights).sum(), [query, *others])
    for ours, theirs in zip(gradients, torch.autograd.grad((expected * weights).sum(), [query, *others]), strict=True):
        assert theirs.abs().sum() > 0
        torch.testing.assert_close(ours, theirs)


def test_gradients_are_those_of_finite_differences() -> None:
    (query, *others), seen = make(2, 2)

    def attend(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        text, *branch_entries = pairs(list(others))
        return Entries(text, branch_entries).attend(query, seen, 0.3)

    assert torch.autograd.gradcheck(attend, (query, *others), fast_mode=True)


def test_narrow_types_are_merged_in_float32() -> None:
    (query, *others), seen = make(3, 2)
    wide = Entries(*_text_and_own(others)).attend(query, seen, 0.3)
    narrow = [tensor.detach().bfloat16() for tensor in others]
    actual = Entries(*_text_and_own(narrow)).attend(query.detach().bfloat16(), seen, 0.3)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), wide, rtol=0.05, atol=0.05)


def test_depths_share_the_mask_of_their_text() -> None:
    (query, *others), seen = make(2, 2)
    text, *branch_entries = pairs(others)
    masks: Masks = {}
    shared = [Entries(text, branch_entries[:depth], masks).attend(query, seen, 0.3) for depth in (1, 2)]
    apart = [Entries(text, branch_entries[:depth]).attend(query, seen, 0.3) for depth in (1, 2)]
    torch.testing.assert_close(shared, apart, rtol=0, atol=0)
    (mask,) = masks.values()
    mask.zero_()  # all of the text is visible
    everything = Entries(text, branch_entries).attend(query, torch.ones_like(seen), 0.3)
    torch.testing.assert_close(Entries(text, branch_entries, masks).attend(query, seen, 0.3), everything)
    assert not torch.equal(everything, apart[1])


def _text_and_own(tensors: list[torch.Tensor]):
    text, *branch_entries = pairs(tensors)
    return text, branch_entries
