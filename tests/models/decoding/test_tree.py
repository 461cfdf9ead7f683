"""Draft trees: what a reader can check by eye."""

import pytest
import torch
from jaxtyping import TypeCheckError

from outrider.models.decoding import DraftTree, chain_tree, empty_tree
from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters.beams import pack_beams


def test_lineage_and_mask_of_the_tree_in_the_docstring():
    tree = DraftTree(tokens=torch.tensor([[5, 6, 7, 8]]), parents=torch.tensor([[-1, -1, 0, 0]]), max_depth=2)
    assert tree.lineage.tolist() == [[[0, -1], [1, -1], [2, 0], [3, 0]]]
    assert tree.depths.tolist() == [[1, 1, 2, 2]]
    assert tree.ancestor_mask().int().tolist() == [[[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]]


def test_a_chain_sees_everything_before_it():
    tree = chain_tree(torch.tensor([[3, 1, 2]]))
    assert tree.parents.tolist() == [[-1, 0, 1]]
    assert tree.depths.tolist() == [[1, 2, 3]]
    assert tree.ancestor_mask().int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]


def test_padding_has_no_depth_no_lineage_and_nobody_sees_it():
    tree = DraftTree(tokens=torch.tensor([[5, 6], [7, NO_NODE]]), parents=torch.tensor([[-1, 0], [-1, NO_NODE]]), max_depth=2)
    assert tree.depths.tolist() == [[1, 2], [1, 0]]
    assert tree.lineage[1].tolist() == [[0, -1], [-1, -1]]
    assert tree.ancestor_mask()[1].int().tolist() == [[1, 0], [0, 0]]


def test_the_empty_tree_has_neither_nodes_nor_depth():
    tree = empty_tree(2, torch.device("cpu"))
    assert tree.num_nodes == 0
    assert tree.ancestor_mask().shape == (2, 0, 0)


def test_tokens_and_parents_of_different_shapes_are_refused():
    with pytest.raises((ValueError, TypeCheckError)):
        DraftTree(tokens=torch.zeros(1, 3, dtype=torch.long), parents=torch.zeros(1, 2, dtype=torch.long), max_depth=1)


def test_shared_prefixes_are_packed_once():
    # A B C / A B D / A E F, the example of the docstring, with letters as numbers.
    tree = pack_beams(torch.tensor([[[1, 2, 3], [1, 2, 4], [1, 5, 6]]]))
    assert tree.tokens.tolist() == [[1, 2, 5, 3, 4, 6]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2]]


def test_equal_tokens_under_different_prefixes_stay_apart():
    tree = pack_beams(torch.tensor([[[1, 3], [2, 3]]]))
    assert tree.tokens.tolist() == [[1, 2, 3, 3]]
    assert tree.parents.tolist() == [[-1, -1, 0, 1]]


def test_rows_with_fewer_nodes_are_padded():
    tree = pack_beams(torch.tensor([[[1, 2], [1, 2]], [[1, 2], [3, 4]]]))
    assert tree.tokens.tolist() == [[1, 2, -1, -1], [1, 3, 2, 4]]
    assert tree.parents.tolist() == [[-1, 0, -1, -1], [-1, -1, 0, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_every_beam_is_a_path_and_every_path_a_beam(seed: int):
    generator = torch.Generator().manual_seed(seed)
    beams = torch.randint(0, 3, (2, 6, 4), generator=generator)
    tree = pack_beams(beams)
    num_checked = 0
    for row in range(2):
        expected = {tuple(beam[:depth]) for beam in beams[row].tolist() for depth in range(1, 5)}
        found = []
        for node in range(tree.num_nodes):
            if tree.tokens[row, node] == NO_NODE:
                continue
            assert tree.parents[row, node] < node, "a parent must come before its child"
            path = [int(tree.tokens[row, n]) for n in tree.lineage[row, node].tolist() if n != NO_NODE]
            found.append(tuple(reversed(path)))
            num_checked += 1
        assert len(found) == len(set(found)), "a prefix is in the tree twice"
        assert set(found) == expected
    assert num_checked >= 8
