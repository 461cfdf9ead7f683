"""Attention with keys in parts, against one softmax in float64: both kernels, all types, hidden parts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.models.llm import split_attention
from outrider.models.llm.split_attention import MAX_PARTS, attend_split, count_parts, split_mask
from outrider.models.llm.tree_attention import IMPLEMENTATION, tree_attention_mask
from outrider.models.llm.tree_cache import ACCELERATOR_EXTENT_STEP

from ..recorder import ReplayingRecorder
from . import efficient_attention

KV_HEADS, HEAD_DIM, COLUMNS = 2, 16, 256
PARTS = (1, 4, 8, 16, MAX_PARTS)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(params=["cpu", "cuda"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use the CPU's kernel, or an imitation of CUDA's, which checks what CUDA's checks."""
    if request.param == "cpu":
        yield "cpu"
    else:
        with efficient_attention.on_cpu():
            yield "cuda"


def tensors(dtype: torch.dtype, *, batch: int, groups: int, num_queries: int, columns: int = COLUMNS) -> Any:
    generator = torch.Generator().manual_seed(batch * 100 + groups * 10 + num_queries)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    # As in a model: heads after queries in memory, and a cache that is longer than what is read.
    query = normal(batch, num_queries, KV_HEADS * groups, HEAD_DIM).transpose(1, 2)
    key, value = (normal(batch, KV_HEADS, columns + 24, HEAD_DIM)[:, :, :columns] for _ in range(2))
    return query, key, value


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute one softmax over the visible keys in float64: [batch, query, head, head_dim]."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(query.shape[1] // KV_HEADS, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(mask < -1, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def tree_mask(
    dtype: torch.dtype, lengths: list[int], num_queries: int, window: int | None = None, columns: int = COLUMNS
) -> torch.Tensor:
    """Return the mask of chains of nodes after texts of these lengths."""
    depth = num_queries - 1
    chain = torch.tensor([[node - up if up <= node else -1 for up in range(depth)] for node in range(depth)])
    lineage = chain.view(1, depth, depth).expand(len(lengths), -1, -1).contiguous()
    return tree_attention_mask(lineage.long(), torch.tensor(lengths), columns, dtype, window)


CASES = {
    "long texts": ([240, 251], None),
    "short texts: most parts hold nothing": ([3, 9], None),
    "one long, one short": ([0, 250], None),
    "a window: the first parts are hidden": ([240, 130], 20),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("lengths", "window"), CASES.values(), ids=CASES)
def test_parts_equal_one_softmax_over_the_visible_keys(kernel, dtype, lengths, window):
    num_cases = 0
    for groups in (1, 2, 4):
        for num_queries in (1, 5):
            mask = tree_mask(dtype, lengths, num_queries, window)
            for batch in (1, 2):
                query, key, value = tensors(dtype, batch=batch, groups=groups, num_queries=num_queries)
                expected = by_hand(query, key, value, mask[:batch], 0.3)
                for num_parts in PARTS:
                    actual = attend_split(query, key, value, split_mask(mask[:batch], num_parts), 0.3)
                    assert actual.dtype == dtype
                    assert actual.is_contiguous()
                    assert (actual.double() - expected).abs().max() < TOLERANCES[dtype], (groups, num_queries, batch, num_parts)
                    num_cases += 1
    assert num_cases == 12 * len(PARTS)


def test_hidden_parts_change_no_bit_of_the_others(kernel):
    """A weight that is only nearly zero would let the unwritten columns of a cache into the result."""
    query, key, value = tensors(torch.bfloat16, batch=1, groups=2, num_queries=5)
    mask = split_mask(tree_mask(torch.bfloat16, [3], 5), 8)
    before = attend_split(query, key, value, mask, None)
    value[:, :, 64:] = 1e30
    assert torch.equal(attend_split(query, key, value, mask, None), before)


def test_widths_of_keys_and_values_may_differ():
    with efficient_attention.on_cpu():
        query, key, _ = tensors(torch.float32, batch=2, groups=2, num_queries=3)
        value = torch.randn(2, KV_HEADS, COLUMNS, 8)
        actual = attend_split(query, key, value, split_mask(tree_mask(torch.float32, [200, 100], 3), 4), None)
    expected = by_hand(query, key, value, tree_mask(torch.float32, [200, 100], 3), HEAD_DIM**-0.5)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_keys_are_not_copied(monkeypatch):
    """A copy would read and write the cache once more, which costs more than parts gain."""
    query, key, value = tensors(torch.float32, batch=2, groups=2, num_queries=3)
    seen = []
    original = split_attention.attention

    def attention(query, key, value, mask, scale):
        seen.extend([key, value])
        return original(query, key, value, mask, scale)

    monkeypatch.setattr(split_attention, "attention", attention)
    attend_split(query, key, value, split_mask(tree_mask(torch.float32, [200, 100], 3), 4), None)
    memory = {tensor.untyped_storage().data_ptr() for tensor in (key, value)}
    assert [part.untyped_storage().data_ptr() in memory for part in seen] == [True] * 4


@pytest.mark.parametrize(
    ("num_processors", "num_groups", "num_keys", "expected"),
    [
        (132, 8, 1024, 8),  # parts of 128 keys
        (132, 8, 8192, 16),
        (132, 32, 8192, 4),
        (132, 2, 8192, 32),
        (132, 2, 1280, 8),
        (20, 32, 8192, 1),  # the groups fill the card
        (132, 2, 1024 + 8, 1),  # parts would not be equally long
    ],
)
def test_parts_fill_the_card(num_processors, num_groups, num_keys, expected):
    assert count_parts(num_processors, num_groups, num_keys) == expected


def test_every_extent_on_an_accelerator_can_be_split():
    for num_steps in range(4, 40):
        assert count_parts(132, 2, num_steps * ACCELERATOR_EXTENT_STEP) > 1


# --- as transformers calls it


def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
    output, _ = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION](nn.Module(), *args, **kwargs)
    return output


def test_the_number_of_parts_is_the_masks(monkeypatch):
    query, key, value = tensors(torch.float32, batch=2, groups=2, num_queries=3)
    mask = tree_mask(torch.float32, [200, 100], 3)
    whole = attend(query, key, value, mask)
    parts = []
    original = split_attention.attention

    def attention(query, *args):
        parts.append(len(query))
        return original(query, *args)

    monkeypatch.setattr(split_attention, "attention", attention)
    for num_parts in PARTS:
        torch.testing.assert_close(attend(query, key, value, split_mask(mask, num_parts)), whole)
    assert parts == [num_parts for num_parts in PARTS[1:] for _ in range(2)], "one part is the usual attention"


@pytest.mark.slow
def test_one_compiled_graph_serves_all_numbers_of_parts(kernel):
    """Each further graph of a large model takes a minute, and a model has at most eight."""
    num_graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return aot_eager(graph, inputs)

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    num_cases = 0
    with torch.inference_mode():
        for columns in (COLUMNS, 2 * COLUMNS, 3 * COLUMNS):
            query, key, value = tensors(torch.float32, batch=2, groups=2, num_queries=3, columns=columns)
            for num_parts in PARTS[1:]:
                mask = tree_mask(torch.float32, [columns - 56, columns - 156], 3, columns=columns)
                mask = split_mask(mask, num_parts)
                torch.testing.assert_close(compiled(query, key, value, mask), attend(query, key, value, mask))
                num_cases += 1
    assert num_cases == 12
    assert num_graphs <= 3, "the first shape, other parts, other lengths"


def test_the_compiler_knows_the_shapes_and_layouts_of_parts(kernel):
    """Compiled code would read memory in another order than it was written."""
    query, key, value = tensors(torch.bfloat16, batch=2, groups=1, num_queries=6)
    mask = torch.zeros(2, 8, 1, 6, COLUMNS // 8, dtype=torch.bfloat16).expand(-1, -1, KV_HEADS, -1, -1)
    tests = ("test_schema", "test_faketensor")
    results = torch.library.opcheck(torch.ops.outrider.attend_parts, (query, key, value, mask, 0.3), test_utils=tests)
    assert results == dict.fromkeys(tests, "SUCCESS")


def test_a_recording_attends_to_other_texts_without_the_host(kernel):
    """The recorder fails where the host reads a value, as a capture does."""
    query, key, value = tensors(torch.float32, batch=2, groups=2, num_queries=3)
    mask = split_mask(tree_mask(torch.float32, [200, 100], 3), 8)
    with torch.inference_mode():
        replay, output = ReplayingRecorder()(lambda: attend_split(query, key, value, mask, None))
        other = tree_mask(torch.float32, [4, 253], 3)
        mask.copy_(split_mask(other, 8))
        query.mul_(-1)
        replay()
        expected = by_hand(query, key, value, other, HEAD_DIM**-0.5)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
