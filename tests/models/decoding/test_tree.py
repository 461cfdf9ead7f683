"""Draft trees that a reader can check by eye."""

import random

import pytest
import torch
from jaxtyping import TypeCheckError

from outrider.models.decoding import DraftTree, chain_tree, empty_tree
from outrider.models.decoding.tree import tree_of
from outrider.models.decoding.types import NO_NODE
from outrider.models.llm.tree_attention import tree_attention_mask


def ancestors(tree: DraftTree) -> torch.Tensor:
    """Return which nodes of the tree each node attends to.

    That is the attention mask after an empty text, without the column of the last committed token.
    """
    nothing = torch.zeros(len(tree.tokens), dtype=torch.long)
    return (tree_attention_mask(tree.lineage, nothing, 1 + tree.num_nodes, torch.float32)[:, 0, 1:, 1:] == 0).int()


def test_lineage_and_mask_of_the_tree_in_the_docstring():
    tree = DraftTree(tokens=torch.tensor([[5, 6, 7, 8]]), parents=torch.tensor([[-1, -1, 0, 0]]), max_depth=2)
    assert tree.lineage.tolist() == [[[0, -1], [1, -1], [2, 0], [3, 0]]]
    assert tree.depths.tolist() == [[1, 1, 2, 2]]
    assert ancestors(tree).tolist() == [[[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]]


def test_a_chain_sees_everything_before_it():
    tree = chain_tree(torch.tensor([[3, 1, 2]]))
    assert tree.parents.tolist() == [[-1, 0, 1]]
    assert tree.depths.tolist() == [[1, 2, 3]]
    assert ancestors(tree).tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]


def test_padding_has_no_depth_and_no_lineage_and_is_masked():
    tree = DraftTree(tokens=torch.tensor([[5, 6], [7, NO_NODE]]), parents=torch.tensor([[-1, 0], [-1, NO_NODE]]), max_depth=2)
    assert tree.depths.tolist() == [[1, 2], [1, 0]]
    assert tree.lineage[1].tolist() == [[0, -1], [-1, -1]]
    assert ancestors(tree)[1].tolist() == [[1, 0], [0, 0]]


def test_the_empty_tree_has_neither_nodes_nor_depth():
    tree = empty_tree(2, torch.device("cpu"))
    assert tree.num_nodes == 0
    assert ancestors(tree).shape == (2, 0, 0)


def test_tokens_and_parents_of_different_shapes_are_refused():
    with pytest.raises((ValueError, TypeCheckError)):
        DraftTree(tokens=torch.zeros(1, 3, dtype=torch.long), parents=torch.zeros(1, 2, dtype=torch.long), max_depth=1)


# --- trees of lists, against trees whose lineage is computed from tensors


@pytest.mark.parametrize("seed", range(12))
def test_the_tree_is_that_of_padded_tensors(seed):
    chance = random.Random(seed)
    rows = []
    for num_nodes in [chance.randint(0, 9) for _ in range(1 + seed % 3)]:
        parents = [chance.randrange(NO_NODE, node) for node in range(num_nodes)]
        rows.append((range(10, 10 + num_nodes), parents))
    tree = tree_of(rows, torch.device("cpu"))
    larger = tree_of(rows, torch.device("cpu"), num_nodes=tree.num_nodes + 2, max_depth=tree.max_depth + 3)
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
        tree_of([([5, 6], [NO_NODE, 0])], torch.device("cpu"), max_depth=1)
