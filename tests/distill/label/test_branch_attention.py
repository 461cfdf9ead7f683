"""The parts of branch attention, against attention written out in full."""

import numpy as np
import pytest
import torch

from outrider.distill.label import branch_attention
from outrider.distill.label.branch_attention import BranchCache, attention_with_lse, make_segments


def full_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend with a query [head, dim] to keys and values [kv_head, key, dim], and to a sink per head."""
    groups = len(query) // len(keys)
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scores = torch.einsum("hd,hkd->hk", query, keys) * scale
    scores = scores if sinks is None else torch.cat([scores, sinks[:, None]], 1)
    return torch.einsum("hk,hkd->hd", scores.softmax(-1)[:, : keys.shape[1]], values)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 100, 4, 2, 1])
@pytest.mark.parametrize("value_dim", [8, 6], ids=["kernel", "plain"])
def test_branches_attend_to_their_text_and_their_own_tokens_only(
    value_dim: int, window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branch_attention, "SEGMENT_QUERIES", 2)
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, scale = 4, 2, 8, 0.3
    sinks = torch.randn(heads, generator=generator) if has_sinks else None
    text_keys = torch.randn(3, kv_heads, 9, dim, generator=generator)
    text_values = torch.randn(3, kv_heads, 9, value_dim, generator=generator)
    rows, positions = np.array([0, 0, 0, 2, 2]), np.array([0, 4, 5, 3, 8])
    branches = BranchCache([text_keys], [text_values], rows, positions)
    own_entries: list[tuple[torch.Tensor, torch.Tensor]] = []
    visited = 0
    for step in range(3):
        if step == 2:
            kept = np.array([0, 2, 4])
            assert branches.keep(kept).tolist() == kept.tolist()
            rows, positions = rows[kept], positions[kept]
            own_entries = [(key[kept], value[kept]) for key, value in own_entries]
        query = torch.randn(len(rows), heads, dim, generator=generator)
        key = torch.randn(len(rows), kv_heads, dim, generator=generator)
        value = torch.randn(len(rows), kv_heads, value_dim, generator=generator)
        own_entries.append((key, value))
        assert branches.store(0, key, value) == 0
        output = branches.attend(0, query, (text_keys, text_values), scale, window, sinks)
        assert branches.num_steps == step + 1
        for branch, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            keys = torch.cat([text_keys[row, :, : position + 1], torch.stack([key[branch] for key, _ in own_entries], 1)], 1)
            values = torch.cat(
                [text_values[row, :, : position + 1], torch.stack([value[branch] for _, value in own_entries], 1)], 1
            )
            reach = slice(None) if window is None else slice(-window, None)
            expected = full_attention(query[branch], keys[:, reach], values[:, reach], scale, sinks)
            torch.testing.assert_close(output[branch], expected)
            visited += 1
    assert visited == 5 + 5 + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain_and_kernel_attention_agree(dtype: torch.dtype) -> None:
    """PyTorch's kernel must accept grouped heads; a version without this fails here."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 5, 8, generator=generator).to(dtype)
    key, value = torch.randn(2, 2, 7, 8, generator=generator).to(dtype)
    mask = torch.zeros(5, 7, dtype=dtype).masked_fill_(torch.arange(7) > torch.tensor([0, 2, 2, 5, 6])[:, None], float("-inf"))
    output, lse = attention_with_lse(query, key, value, mask, 0.4)
    kernel_output, kernel_lse = branch_attention.attention_by_kernel(query, key, value, mask[None, None], 0.4)
    tolerance = {"atol": 0.03, "rtol": 0.0} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(output, kernel_output, **tolerance)
    torch.testing.assert_close(lse, kernel_lse, check_dtype=False, **tolerance)


def test_segments_cover_every_branch_once_and_read_no_more_keys_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch_attention, "SEGMENT_QUERIES", 2)
    rows, positions = np.array([0, 0, 0, 2]), np.array([3, 4, 9, 2])
    segments = make_segments(rows, positions, torch.from_numpy(positions), torch.float32)
    assert [(s.row, s.start, s.stop, s.mask.shape[1]) for s in segments] == [(0, 0, 2, 5), (0, 2, 3, 10), (2, 3, 4, 3)]
    assert segments[0].mask.isinf().tolist() == [[False] * 4 + [True], [False] * 5]
    assert make_segments(rows[:0], positions[:0], torch.empty(0, dtype=torch.long), torch.float32) == []
