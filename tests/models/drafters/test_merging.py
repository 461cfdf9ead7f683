"""Merged trees of small candidates that a reader can check by eye."""

import math
from itertools import pairwise

import pytest
import torch

from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters.beams import SearchTree
from outrider.models.drafters.calibration import MAX_DEPTH, agreement_key, source_key
from outrider.models.drafters.merging import MergedRow, Proposals, follow, merge_row, rows_of_search
from outrider.models.drafters.training_free import Candidates

A, B, C, D, E = range(10, 15)


def candidates(*nodes: tuple[int, int, float]) -> Candidates:
    """Return candidates from (token, parent, score)."""
    tokens, parents, scores = zip(*nodes, strict=True)
    return Candidates(tokens=tokens, parents=parents, scores=scores, bins=[0] * len(tokens))


def merge(*sources: Candidates, max_nodes: int = 99, counts=None, floors=None, is_chain: bool = False) -> MergedRow:
    proposals = [Proposals(index, source) for index, source in enumerate(sources)]
    return merge_row(proposals, counts or {}, max_nodes, floors, is_chain=is_chain)


def paths(row: MergedRow) -> dict[tuple[int, ...], tuple[int, float]]:
    """Map each path to its node's sources and probability."""
    result: dict[tuple[int, ...], tuple[int, float]] = {}
    names: list[tuple[int, ...]] = []
    for token, parent, prob, origin in zip(row.tokens, row.parents, row.probs, row.origins, strict=True):
        names.append((token,) if parent == NO_NODE else (*names[parent], token))
        result[names[-1]] = (origin, prob)
    return result


def test_equal_prefixes_are_one_node_with_both_sources():
    """A B C and A B D share A B; E is the second source's alone."""
    first = candidates((A, -1, 0.9), (B, 0, 0.8), (C, 1, 0.7))
    second = candidates((A, -1, 0.6), (E, -1, 0.2), (B, 0, 0.5), (D, 2, 0.5))
    merged = paths(merge(first, second))
    assert {path: origin for path, (origin, _) in merged.items()} == {
        (A,): 0b11,
        (A, B): 0b11,
        (A, B, C): 0b01,
        (A, B, D): 0b10,
        (E,): 0b10,
    }
    assert merged[(A,)][1] == 0.9, "agreement: the best estimate"
    assert merged[(E,)][1] < 0.2, "dissent: less than its own"


def test_a_chain_has_the_likeliest_token_after_each_other():
    """C is likelier than B's child, but stands beside B; after B both sources go on."""
    first = candidates((B, -1, 0.9), (C, -1, 0.6), (A, 0, 0.1), (D, 1, 0.9))
    second = candidates((B, -1, 0.5), (E, 0, 0.2), (A, 1, 0.9))
    row = merge(first, second, is_chain=True)
    assert list(paths(row)) == [(B,), (B, E), (B, E, A)]
    assert len(merge(first, second, is_chain=True, max_nodes=2).tokens) == 2


def test_a_single_sources_tree_is_its_likeliest_nodes_with_falling_probabilities():
    row = merge(candidates((A, -1, 0.5), (B, -1, 0.4), (C, 0, 0.9), (D, 1, 0.1), (E, 2, 0.9)), max_nodes=4)
    assert list(paths(row)) == [(A,), (A, C), (A, C, E), (B,)]
    assert row.probs == pytest.approx([0.5, 0.45, 0.405, 0.4])
    assert all(above >= below for above, below in pairwise(row.probs))
    assert row.depths == [1, 2, 3, 1]


def test_growing_stops_at_the_floor_of_the_next_node():
    source = candidates((A, -1, 0.5), (B, -1, 0.4), (C, 0, 0.1))
    assert len(merge(source, floors=[0.0, 0.45, 0.0]).tokens) == 1
    assert len(merge(source, floors=[0.0, 0.3, 0.3]).tokens) == 2
    assert len(merge(source, floors=[0.6, 0.0, 0.0]).tokens) == 0


def test_hits_and_misses_move_the_estimates_of_their_cells_only():
    counts: dict[int, tuple[float, float]] = {}
    source = candidates((A, -1, 0.5), (B, 0, 0.5))
    for _ in range(50):
        row = merge(source, counts=counts)
        walks = follow(follow([(row, NO_NODE)], A, counts), C, counts)
        assert walks == ()
    assert counts == {source_key(0, 1): (50, 50), source_key(0, 2): (0, 50)}
    merged = paths(merge(source, counts=counts))
    assert merged[(A,)][1] > 0.9
    assert merged[(A, B)][1] < 0.1


def test_estimates_fall_where_agreement_is_wrong():
    counts: dict[int, tuple[float, float]] = {}
    first, second = candidates((A, -1, 0.5)), candidates((A, -1, 0.5), (B, -1, 0.3))
    before = paths(merge(first, second))
    for _ in range(60):
        follow([(merge(first, second, counts=counts), NO_NODE)], B, counts)
    after = paths(merge(first, second, counts=counts))
    assert before[(A,)][1] > 2 * before[(B,)][1]
    assert after[(A,)][1] < 0.1
    assert after[(B,)][1] > 0.8
    assert agreement_key(0b11, 0b11, 0.02) > source_key(7, MAX_DEPTH) + 63, "the tables don't overlap"


def test_the_likeliest_nodes_of_a_search_have_probabilities_after_their_parents():
    logs = [[math.log(p) for p in (0.6, 0.3, 0.42, 0.06, 0.02)]]
    search = SearchTree(
        tokens=torch.tensor([[A, B, C, D, E]]),
        parents=torch.tensor([[-1, -1, 0, 0, 1]]),
        scores=torch.tensor(logs),
        level_sizes=(2, 3),
    )
    (row,) = rows_of_search(search, 4)
    assert (row.tokens, row.parents) == ([A, B, C, D], [-1, -1, 0, 0])
    assert row.scores == pytest.approx([0.6, 0.3, 0.7, 0.1], rel=1e-5)
    assert len(rows_of_search(search, 99)[0].tokens) == 5


def test_scores_without_probability_are_zero_and_nan_is_an_error():
    def search(*scores: float) -> SearchTree:
        tokens, parents = torch.tensor([[A, B, C]]), torch.tensor([[-1, -1, 1]])
        return SearchTree(tokens=tokens, parents=parents, scores=torch.tensor([scores]), level_sizes=(2, 1))

    (row,) = rows_of_search(search(0.0, -math.inf, -math.inf), 9)
    assert row.scores == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="not numbers"):
        rows_of_search(search(0.0, math.nan, -1.0), 9)


def test_a_proposal_teaches_as_long_as_the_text_follows_it():
    """The walk goes from the root over A to its child B; C after B was never proposed."""
    counts: dict[int, tuple[float, float]] = {}
    row = merge(candidates((A, -1, 0.5), (D, -1, 0.4), (B, 0, 0.5)))
    walks = follow([(row, NO_NODE)], A, counts)
    assert walks == ((row, 0),)
    assert counts == {source_key(0, 1): (1, 2)}
    walks = follow(walks, B, counts)
    assert counts[source_key(0, 2)] == (1, 1)
    assert follow(walks, C, counts) == ()
    assert counts == {source_key(0, 1): (1, 2), source_key(0, 2): (1, 1)}
