"""Attention over grouped heads, in both of its forms, against keys and values repeated for every head."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from outrider.models import tree_attention
from outrider.models.tree_attention import attend_folded, attend_grouped


@pytest.mark.parametrize("attend", [attend_grouped, attend_folded])
@pytest.mark.parametrize(("batch", "groups", "num_queries"), [(1, 1, 1), (2, 2, 5), (3, 4, 1)])
def test_grouped_heads_read_what_repeated_ones_do(attend, batch, groups, num_queries):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 3 * groups, num_queries, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, batch, 3, 7, 8, generator=generator, dtype=torch.float64)
    mask = torch.randn(batch, 1, num_queries, 7, generator=generator, dtype=torch.float64)
    repeated = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    expected = scaled_dot_product_attention(query, *repeated, mask, scale=0.3)
    torch.testing.assert_close(attend(query, key, value, mask, 0.3), expected)


def test_arguments_that_it_does_not_know_are_left_to_transformers():
    query, key = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 3, 8)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    with pytest.raises(ValueError, match="softcap"):
        tree_attention._grouped_heads_forward(module, query, key, key, torch.zeros(1, 1, 2, 3), softcap=5.0)
