"""The search over a lattice of candidates, against all paths of a small vocabulary."""

import itertools

import pytest
import torch

from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters.beams import SearchTree
from outrider.models.drafters.corrections import Markov, lattice_search
from outrider.models.drafters.vocabulary import DraftVocabulary

VOCAB, HIDDEN, RANK, SLOTS = 6, 5, 3, 3


@pytest.fixture
def correction() -> Markov:
    torch.manual_seed(0)
    made = Markov(VOCAB, VOCAB, RANK)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made.double()


HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
HIDDEN_STATES = torch.randn(2, SLOTS, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LAST = torch.tensor([4, 1])


def search(correction: Markov, **options: int) -> SearchTree:
    limits = {"width": VOCAB**SLOTS, "num_candidates": VOCAB, **options}
    return lattice_search(correction, HIDDEN_STATES @ HEAD.T, LAST, DraftVocabulary(size=VOCAB), **limits)


def paths(tree: SearchTree, row: int) -> dict[tuple[int, ...], float]:
    """Return all paths of a row with their scores."""
    found: dict[int, tuple[int, ...]] = {NO_NODE: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True)):
        found[node] = (*found[parent], token)
    assert len(set(found.values())) == len(found), "siblings are the same token"
    return {path: tree.scores[row, node].item() for node, path in found.items() if node != NO_NODE}


def true_score(correction: Markov, row: int, path: tuple[int, ...]) -> float:
    """Return a path's log-probability by the correction's own logits."""
    total, before = 0.0, int(LAST[row])
    for slot, token in enumerate(path):
        state = correction.state(torch.tensor([before]))
        logits = correction.logits(HIDDEN_STATES[row, slot][None], state, lambda hidden: hidden @ HEAD.T)
        total += logits.log_softmax(-1)[0, token].item()
        before = token
    return total


def test_with_all_candidates_every_path_has_its_own_probability(correction: Markov) -> None:
    tree = search(correction)
    assert tree.level_sizes == (VOCAB, VOCAB**2, VOCAB**3)
    for row in range(2):
        scores = paths(tree, row)
        expected = [path for depth in range(1, SLOTS + 1) for path in itertools.product(range(VOCAB), repeat=depth)]
        assert sorted(scores) == sorted(expected)
        for path in expected:
            assert scores[path] == pytest.approx(true_score(correction, row, path), abs=1e-5)


def test_a_narrow_search_keeps_the_best_successors_of_its_paths(correction: Markov) -> None:
    width = 4
    tree = search(correction, width=width)
    assert tree.level_sizes == (width,) * SLOTS
    for row in range(2):
        beams: list[tuple[int, ...]] = [()]
        expected: list[tuple[int, ...]] = []
        for _ in range(SLOTS):
            successors = [(*beam, token) for beam in beams for token in range(VOCAB)]
            beams = sorted(successors, key=lambda path: -true_score(correction, row, path))[:width]
            expected += beams
        assert list(paths(tree, row)) == expected


def test_few_candidates_are_the_likeliest_tokens_before_the_correction(correction: Markov) -> None:
    tree = search(correction, num_candidates=2)
    best = (HIDDEN_STATES @ HEAD.T).topk(2).indices.tolist()
    for row in range(2):
        scores = paths(tree, row)
        assert {path[-1] for path in scores if len(path) == 2} == set(best[row][1])
        # The probability that is left for the other tokens is at least zero.
        assert all(score <= 0 for score in scores.values())
        assert sum(torch.tensor(score).exp() for path, score in scores.items() if len(path) == 1) <= 1 + 1e-6


def test_a_child_never_has_a_higher_score_than_its_parent(correction: Markov) -> None:
    tree = search(correction, width=5, num_candidates=1)
    for row in range(2):
        scores = paths(tree, row)
        assert all(score <= scores.get(path[:-1], 0.0) for path, score in scores.items())
