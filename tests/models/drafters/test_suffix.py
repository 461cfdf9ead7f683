"""SuffixDecoding against naive counts."""

import itertools
import random

import pytest

from outrider.models.decoding.tree import depths_of
from outrider.models.drafters import suffix as suffix_module
from outrider.models.drafters.suffix import Suffix, SuffixConfig
from outrider.models.drafters.training_free import Candidates


def drafted(drafter: Suffix, text: list[int]) -> Candidates:
    """Return the candidates after a text."""
    store = drafter.new_store()
    for start in range(0, len(text) - 1, 3):
        store.add(text[start : min(start + 3, len(text) - 1)])
    found = drafter.candidates_of(store, text[-1:])
    assert len(found.tokens) == len(found.parents) == len(found.scores) == len(found.bins) <= drafter.config.tree_nodes
    assert len(set(zip(found.parents, found.tokens, strict=True))) == len(found.tokens), "siblings differ"
    assert all(parent < node for node, parent in enumerate(found.parents))
    assert all(0 < score < 1 for score in found.scores)
    assert all(0 <= number < len(suffix_module.PRIOR) * len(suffix_module.PRIOR[0]) for number in found.bins)
    assert store.text == text[:-1]
    return found


def paths_of(found: Candidates) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def naive_probs(windows: list[list[int]]) -> dict[tuple[int, ...], float]:
    """Return the probability of each path that occurs after some place."""
    probs = {(): 1.0}
    for path in sorted({tuple(window[:end]) for window in windows for end in range(1, len(window) + 1)}, key=len):
        starts = [tuple(window[: len(path)]) for window in windows if len(window) >= len(path)]
        siblings = [start for start in starts if start[:-1] == path[:-1]]
        prob = probs.get(path[:-1], 0.0) * starts.count(path) / len(siblings)
        if prob >= suffix_module.MIN_PROB:
            probs[path] = prob
    return probs


def naive(text: list[int], config: SuffixConfig) -> list[tuple[float, dict]]:
    """Return the score of each match of n tokens, and the probabilities of its paths."""
    trees = []
    for n in range(1, min(len(text), config.depth) + 1):
        length = min(config.depth, config.tree_nodes, suffix_module.NODES_PER_TOKEN * n)
        windows = [text[end:] for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        probs = naive_probs([list(itertools.islice(itertools.cycle(window), length)) for window in windows])
        budget = min(config.tree_nodes, suffix_module.NODES_PER_TOKEN * n)
        trees.append((sum(sorted((probs[path] for path in probs if path), reverse=True)[:budget]), probs))
    return trees


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_has_the_most_expected_tokens_by_naive_counts(seed, monkeypatch):
    monkeypatch.setattr(suffix_module, "MAX_POSITIONS", 64)
    chance = random.Random(seed)
    vocab = chance.choice([2, 4, 20])
    config = SuffixConfig(tree_nodes=chance.randint(1, 12), depth=chance.randint(1, 8))
    monkeypatch.setattr(suffix_module, "NODES_PER_TOKEN", chance.choice([1, 2, 4]))
    monkeypatch.setattr(suffix_module, "MIN_PROB", chance.choice([0.05, 0.3]))
    drafter, num_found = Suffix(config), 0
    for size in range(1, 50, 4):
        text = [chance.randrange(vocab) for _ in range(size)]
        paths = paths_of(drafted(drafter, text))
        trees = naive(text, config)
        best = max(score for score, _ in trees)
        sums = [sum(probs.get(path, -1.0) for path in paths) for score, probs in trees if score == pytest.approx(best)]
        assert any(value == pytest.approx(best) for value in sums), (text, paths)
        num_found += bool(paths)
    assert num_found > 2


def test_longer_matches_never_have_lower_estimates():
    assert all(list(column) == sorted(column) for column in zip(*suffix_module.PRIOR, strict=True))


def test_the_likeliest_continuation_comes_first(monkeypatch):
    monkeypatch.setattr(suffix_module, "NODES_PER_TOKEN", 2)
    drafter = Suffix(SuffixConfig())
    found = drafted(drafter, [1, 5, 6, 1, 7, 8, 1, 5, 9, 1])
    assert paths_of(found) == [(5,), (7,)], "two of three places, then one; 6 and 9 have a third, but 2 nodes are all"


def test_a_longer_match_gets_more_nodes(monkeypatch):
    monkeypatch.setattr(suffix_module, "NODES_PER_TOKEN", 1)
    drafter = Suffix(SuffixConfig())
    text = list(range(20))
    for n in (1, 2, 4, 6):
        assert list(drafted(drafter, [*text, *text[:n]]).tokens) == text[n : 2 * n]


def test_a_text_that_repeats_itself_is_drafted_to_full_depth():
    found = drafted(Suffix(SuffixConfig()), [1, 2] * 30)
    assert list(found.tokens) == [1, 2] * 12
    assert depths_of(found.parents) == list(range(1, 25))


def test_only_the_latest_places_of_frequent_tokens_are_counted(monkeypatch):
    monkeypatch.setattr(suffix_module, "NODES_PER_TOKEN", 1)
    monkeypatch.setattr(suffix_module, "MAX_POSITIONS", 4)
    found = drafted(Suffix(SuffixConfig()), [*[1, 5] * 20, *[9, 1, 6] * 4, 8, 1])
    assert list(found.tokens) == [6]


def test_long_matches_are_found_beyond_the_latest_places(monkeypatch):
    monkeypatch.setattr(suffix_module, "NODES_PER_TOKEN", 1)
    monkeypatch.setattr(suffix_module, "MAX_POSITIONS", 2)
    text = [1, 2, 3, 4, 5, 6, *[8, 4] * 9, 1, 2, 3, 4]
    assert list(drafted(Suffix(SuffixConfig()), text).tokens)[:2] == [5, 6]
