"""Both forms of attention over grouped heads, against keys repeated for every head."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import MistralConfig, MistralForCausalLM

from outrider.models.decoding import Prompts, empty_tree
from outrider.models.decoding.tree import accepted_path
from outrider.models.llm import tree_attention
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.tree_attention import (
    FEW_QUERIES,
    attend_folded,
    attend_grouped,
    has_grouped_kernel,
    hidden_score,
    masks_by_kind,
)


@pytest.mark.parametrize("attend", [attend_grouped, attend_folded])
@pytest.mark.parametrize(("batch", "groups", "num_queries"), [(1, 1, 1), (2, 2, 5), (3, 4, 1)])
def test_grouped_heads_equal_repeated_heads(attend, batch, groups, num_queries):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 3 * groups, num_queries, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, batch, 3, 7, 8, generator=generator, dtype=torch.float64)
    mask = torch.randn(batch, 1, num_queries, 7, generator=generator, dtype=torch.float64)
    repeated = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    expected = scaled_dot_product_attention(query, *repeated, mask, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(attend(query, key, value, mask, 0.3), expected)


@pytest.mark.parametrize(
    ("dtype", "folded"), [(torch.bfloat16, range(1, FEW_QUERIES + 1)), (torch.float32, range(2, FEW_QUERIES + 1))]
)
def test_few_queries_are_folded_on_a_cpu(dtype, folded):
    for num_queries in range(1, FEW_QUERIES + 2):
        assert has_grouped_kernel(torch.zeros(1, 4, num_queries, 8, dtype=dtype)) is (num_queries not in folded)
    assert not has_grouped_kernel(torch.zeros(1, 4, 40, 8, device="meta"))


@pytest.mark.parametrize("window", [None, 8])
def test_plain_decoding_in_16_bits_is_folded_unless_a_window_hides_columns(target, window, monkeypatch):
    """Rows of one length need no mask. Transformers makes the one of a window."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = MistralConfig(**sizes, num_attention_heads=8, num_key_value_heads=2, sliding_window=window)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = MistralForCausalLM(config).eval().requires_grad_(False).to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    reader, extents = HFTarget(model, target.tokenizer, target.identity), list[int]()

    def folded(query, key, *args):
        extents.append(key.shape[2])
        return attend_folded(query, key, *args)

    texts = torch.randint(4, 300, (2, 20))
    reader.prefill(Prompts.of(texts[:, :5]), max_new_tokens=15, max_nodes=0)
    monkeypatch.setattr(tree_attention, "attend_folded", folded)
    tree = empty_tree(2, torch.device("cpu"))
    for place in range(5, 20):
        logits = reader.verify(texts[:, place], tree).logits[:, 0]
        expected = model(texts[:, : place + 1]).logits[:, -1]
        torch.testing.assert_close(logits.float(), expected.float(), atol=0.02, rtol=0.05)
        reader.commit(tree, accepted_path(tree, [[], []]))
    assert len(extents) > (4 if window else 20)
    assert window is None or max(extents) <= window


def test_attention_with_unknown_arguments_is_left_to_transformers():
    query, key = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 3, 8)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    with pytest.raises(ValueError, match="softcap"):
        tree_attention._grouped_heads_forward(module, query, key, key, torch.zeros(1, 1, 2, 3), softcap=5.0)


def as_cuda_lays_it_out(*args, **kwargs):
    """Attend with the memory layout of CUDA's kernel: [batch, query, head, head_dim]."""
    output = scaled_dot_product_attention(*args, **kwargs)
    return output.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("attend", [attend_grouped, attend_folded])
def test_any_memory_layout_of_a_kernels_output_is_accepted(attend, monkeypatch):
    """On a GPU in float32 the kernel's output can't be viewed as groups of heads.

    Decoding once ended with an error there.
    """
    query, key = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 33, 16)
    mask = torch.randn(2, 1, 5, 33)
    expected = attend(query, key, key, mask, None)
    monkeypatch.setattr(tree_attention, "scaled_dot_product_attention", as_cuda_lays_it_out)
    actual = attend(query, key, key, mask, None)
    assert torch.equal(actual, expected)
    assert actual.is_contiguous()
    assert actual.shape == (2, 5, 8, 16)


@pytest.mark.parametrize("start", range(6))
def test_masks_of_some_queries_are_contiguous_copies(start):
    """A slice of a mask may start at an unaligned address, which GPU kernels can't read."""
    lineage, lengths = torch.tensor([[[0, -1], [1, -1], [2, 0], [3, 1], [4, 1]]]), torch.tensor([7])
    options = {"extent": 13, "dtype": torch.bfloat16}
    whole = masks_by_kind({"full_attention": None, "sliding_attention": 4}, lineage, lengths, **options)
    some = masks_by_kind(
        {"full_attention": None, "sliding_attention": 4}, lineage, lengths, **options, queries=slice(start, None)
    )
    for kind, mask in some.items():
        assert torch.equal(mask, whole[kind][:, :, start:])
        assert mask.storage_offset() == 0
        assert mask.is_contiguous()
    assert len(some) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_mask_value_stays_finite_in_powers_of_two(dtype):
    """Kernels work with powers of two: the smallest number times log2(e) is minus infinity.

    A block of such keys would give NaN.
    """
    hidden = torch.tensor(hidden_score(dtype), dtype=dtype)
    assert (hidden * math.log2(math.e)).isfinite()
    assert (hidden - 10.0).exp() == 0
