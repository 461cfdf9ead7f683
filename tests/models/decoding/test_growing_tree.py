"""The growing tree: it survives a step, and forgets nothing below it."""

import random
from itertools import pairwise

import pytest

from outrider.models.decoding.growing_tree import UNREAD, GrowingTree, Rerooted
from outrider.models.decoding.types import NO_NODE

from ..paths import path_to
from .streaming_toys import unread

A, B, C, D, E, F, G, H = range(8)


def drawn() -> GrowingTree:
    """Return a tree with the probabilities of its edges; stars mark read nodes, in this order.

    root ─┬─ .6 ─ A* ─┬─ .5 ─ C* ─┬─ .9 ─ E*  ─── .4 ─ G      nodes A 0, B 1, C 2, D 3, E 5, F 6,
          │           └─ .4 ─ D   └─ .1 ─ F                    G 7, and H 4, a child of B
          └─ .3 ─ B* ─── .8 ─ H                                entries A 1, B 2, C 3, E 4
    """
    tree = GrowingTree()
    tree.add(NO_NODE, [A, B], [0.6, 0.3])
    tree.mark_read(0, 1)
    tree.add(0, [C, D], [0.5, 0.4])
    tree.mark_read(1, 2)
    tree.add(1, [H], [0.8])
    tree.mark_read(2, 3)
    tree.add(2, [E, F], [0.9, 0.1])
    tree.mark_read(5, 4)
    tree.add(5, [G], [0.4])
    return tree


def test_a_node_is_as_likely_as_all_of_its_path():
    tree = drawn()
    assert tree.tokens == [A, B, C, D, H, E, F, G]
    assert tree.parents == [NO_NODE, NO_NODE, 0, 0, 1, 2, 2, 5]
    assert tree.depths == [1, 1, 2, 2, 2, 3, 3, 4]
    assert tree.probs == pytest.approx([0.6, 0.3, 0.3, 0.24, 0.24, 0.27, 0.03, 0.108])
    assert tree.cache_entries == [1, 2, 3, UNREAD, UNREAD, 4, UNREAD, UNREAD]
    assert tree.children(NO_NODE) == [0, 1]
    assert not tree.children(7)


def test_a_node_is_read_once():
    tree = drawn()
    with pytest.raises(AssertionError):
        tree.mark_read(0, 5)


def test_nodes_are_linked_among_each_other():
    assert drawn().links([0, 2, 3, 5]) == ([A, C, D, E], [NO_NODE, 0, 0, 1])


def test_a_text_is_followed_as_far_as_the_tree_has_it():
    tree = drawn()
    assert tree.follow([A, C, E]) == [0, 2, 5]
    assert tree.follow([A, H]) == [0]
    assert tree.follow([H]) == []


def outcome(tree: GrowingTree, tokens: list[int]) -> Rerooted:
    rerooted = tree.rerooted(tokens)
    assert rerooted is not None
    return rerooted


def test_the_tree_below_an_accepted_path_and_a_bonus_token_stays():
    """Accepted A, bonus token C:   root ─┬─ .9 ─ E* ─── .4 ─ G
    └─ .1 ─ F
    """
    tree, nodes, path, entries = outcome(drawn(), [A, C])
    assert (tree.tokens, tree.parents) == ([E, F, G], [NO_NODE, NO_NODE, 0])
    assert tree.probs == pytest.approx([0.9, 0.1, 0.36])
    assert tree.depths == [1, 1, 2]
    assert tree.cache_entries == [1, UNREAD, UNREAD]
    assert nodes == [5, 6, 7]
    assert (path, entries) == ([1], [3, 4])


@pytest.mark.parametrize("tokens", [[A, D], [A, C, E, G], [C], [A, C, H], [A, C, E, G, A]])
def test_tokens_that_are_not_read_or_not_in_the_tree_re_root_nothing(tokens):
    """An unread bonus token, an unknown one, and an accepted path that other drafters had."""
    assert drawn().rerooted(tokens) is None


def test_no_tokens_keep_the_whole_tree():
    tree, nodes, path, entries = outcome(drawn(), [])
    assert (tree.tokens, tree.parents, tree.cache_entries) == (drawn().tokens, drawn().parents, drawn().cache_entries)
    assert (nodes, path, entries) == (list(range(8)), [], [0, 1, 2, 3, 4])


# --- any tree, against one that is built below the new root


def grown(chance: random.Random, num_reads: int, width: int = 3) -> GrowingTree:
    """Return a tree grown as drafters do, sometimes reading a node that isn't the likeliest."""
    tree = GrowingTree()
    tree.add(NO_NODE, chance.sample(range(9), width), [chance.random() for _ in range(width)])
    for entry in range(1, num_reads + 1):
        node = chance.choice(unread(tree)[:4])
        tree.mark_read(node, entry)
        count = chance.randrange(width + 1)
        tree.add(node, chance.sample(range(9), count), [chance.random() for _ in range(count)])
        if not unread(tree):
            break
    return tree


def rebuilt(tree: GrowingTree, tokens: list[int]) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], int]]:
    """Return the probability and the entry of each path below these tokens."""
    probs: dict[tuple[int, ...], float] = {}
    entries: dict[tuple[int, ...], int] = {}
    for node in range(len(tree)):
        path = path_to(tree, node)
        if path[: len(tokens)] == tokens and len(path) > len(tokens):
            below = tuple(path[len(tokens) :])
            probs[below] = tree.estimates[node] * probs.get(below[:-1], 1.0)
            if tree.cache_entries[node] != UNREAD:
                entries[below] = tree.cache_entries[node]
    return probs, entries


@pytest.mark.parametrize("seed", range(40))
def test_a_re_rooted_tree_is_the_one_that_would_have_grown_below_the_new_root(seed):
    chance = random.Random(seed)
    tree = grown(chance, 30)
    num_checked = 0
    for node in [node for node in range(len(tree)) if tree.cache_entries[node] != UNREAD]:
        tokens = path_to(tree, node)
        new, nodes, path, entries = outcome(tree, tokens)
        expected_probs, expected_entries = rebuilt(tree, tokens)
        paths = [tuple(path_to(new, number)) for number in range(len(new))]
        # 1. The same nodes, as likely as seen from the new root, parents first.
        assert dict(zip(paths, new.probs, strict=True)) == pytest.approx(expected_probs)
        assert [tuple(path_to(tree, old)[len(tokens) :]) for old in nodes] == paths
        assert all(parent < number for number, parent in enumerate(new.parents))
        assert new.depths == list(map(len, paths))
        # 2. The entries that stay are those of the new root and of read nodes, gathered in order.
        kept = {paths[number]: entries[entry] for number, entry in enumerate(new.cache_entries) if entry != UNREAD}
        assert kept == expected_entries
        assert entries[0] == tree.cache_entries[node]
        assert all(left < right for left, right in pairwise(entries))
        assert path == [tree.cache_entries[above] for above in tree.follow(tokens)[:-1]]
        # 3. What can be read next is what can be read below the new root.
        open_nodes = [paths[number] for number in unread(new)]
        assert set(open_nodes) == {path for path in paths if path not in kept and (len(path) == 1 or path[:-1] in kept)}
        num_checked += 1
    assert num_checked > 5
