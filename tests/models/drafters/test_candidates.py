"""Trees of candidates, against trees whose lineage is computed from tensors."""

import random

import pytest
import torch

from outrider.models.decoding.tree import DraftTree
from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters.candidates import tree_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(12))
def test_the_tree_is_that_of_padded_tensors(seed):
    chance = random.Random(seed)
    rows = []
    for num_nodes in [chance.randint(0, 9) for _ in range(1 + seed % 3)]:
        parents = [chance.randrange(NO_NODE, node) for node in range(num_nodes)]
        rows.append((range(10, 10 + num_nodes), parents))
    tree = tree_of(rows, CPU)
    larger = tree_of(rows, CPU, num_nodes=tree.num_nodes + 2, max_depth=tree.max_depth + 3)
    assert tree.num_nodes == max(len(parents) for _, parents in rows)
    assert tree.max_depth == (tree.depths.max() if tree.num_nodes else 0)
    for made in (tree, larger):
        expected = DraftTree(tokens=made.tokens, parents=made.parents, max_depth=made.max_depth)
        assert torch.equal(made.lineage, expected.lineage)
        assert torch.equal(made.depths, expected.depths)
        for (drafts, above), tokens, parents in zip(rows, made.tokens.tolist(), made.parents.tolist(), strict=True):
            padding = [NO_NODE] * (made.num_nodes - len(drafts))
            assert (tokens, parents) == ([*drafts, *padding], [*above, *padding])


def test_a_bound_below_the_depth_is_refused():
    with pytest.raises(AssertionError, match="max_depth=1"):
        tree_of([([5, 6], [NO_NODE, 0])], CPU, max_depth=1)
