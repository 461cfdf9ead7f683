"""The window: what is sent, who is alive, and what the stages keep."""

import pytest

from outrider.models.decoding.growing_tree import GrowingTree
from outrider.models.decoding.types import NO_NODE
from outrider.models.decoding.window import DEAD, DraftRun, Keep, Known, Window, after

A, B, C, D, E, F, G = range(7)


def drafted() -> GrowingTree:
    """Return a drafter's tree below A.

    A ─┬─ .6 ─ B ─┬─ .5 ─ D ─── .9 ─ F      nodes B 0, C 1, D 2, E 3, F 4, G 5
       └─ .3 ─ C  └─ .4 ─ E ─── .1 ─ G
    """
    tree = GrowingTree()
    tree.add(NO_NODE, [B, C], [0.6, 0.3])
    tree.add(0, [D, E], [0.5, 0.4])
    tree.add(2, [F], [0.9])
    tree.add(3, [G], [0.1])
    return tree


def links(run: DraftRun) -> tuple[tuple[int, ...], tuple[int, ...], int, Keep | None]:
    return run.tokens, run.parents, run.num_read, run.keep


def started() -> Window:
    """Return a window whose root A was sent alone."""
    window = Window(A)
    assert links(window.send()) == ((A,), (), 0, None)
    return window


def test_the_first_run_is_the_root_alone_and_the_next_ones_build_on_it():
    window, drafts = started(), drafted()
    assert links(window.send(drafts, [0, 1])) == ((B, C), (NO_NODE, NO_NODE), 1, None)
    assert links(window.send(drafts, [2, 4])) == ((D, F), (NO_NODE, NO_NODE, 0, 2), 3, None)
    assert len(window) == 4


def test_unsent_nodes_come_likeliest_first_and_after_their_parents():
    window, drafts = started(), drafted()
    assert list(window.unsent(drafts, 9)) == [0, 1, 2, 4, 3, 5]
    window.send(drafts, [0, 3])
    assert list(window.unsent(drafts, 9)) == [1, 2, 4, 5]
    assert list(window.unsent(drafts, 2)) == [1, 2]
    assert not list(window.unsent(drafts, 0))


def test_a_node_is_sent_once():
    window, drafts = started(), drafted()
    window.send(drafts, [0])
    with pytest.raises(AssertionError, match="sent already"):
        window.send(drafts, [0])


def test_a_bonus_token_in_flight_is_adopted_and_not_sent_twice():
    window, drafts = started(), drafted()
    first, second, third = next(iter(window.runs)), window.send(drafts, [0, 1]), window.send(drafts, [2, 3])
    # 1. After A comes B, which is under way: C is dead, but its run has B.
    assert window.learn(first) == Known([0], [], [])
    assert window.follow([B]) == []
    assert window.is_root_sent
    assert window.root == B
    assert window.runs == {second.number: [NO_NODE, DEAD], third.number: [0, 1]}
    # 2. The next run drops C: D and E move up.
    later = GrowingTree()
    later.add(NO_NODE, [D], [0.5])
    later.add(0, [F], [0.9])
    fourth = window.send(later, [1])
    assert links(fourth) == ((F,), (NO_NODE, NO_NODE, 0), 3, Keep(entries=(0, 1, 3, 4), num_committed=1))
    # 3. After B comes D. E is dead, and D's run is answered with D and F live below.
    assert window.learn(second.number) == Known([0], [], [])
    assert window.follow([D]) == []
    assert window.learn(third.number) == Known([0], [], [])
    assert window.follow([F]) == []
    assert window.learn(fourth.number) == Known([0], [], [])


def test_accepted_nodes_of_a_run_are_known_together():
    window, drafts = started(), drafted()
    root, run = next(iter(window.runs)), window.send(drafts, [0, 1, 2])
    window.learn(root)
    window.follow([B])
    # The root is B now. C is dead, D is live.
    assert window.learn(run.number) == Known([0, 2], [D], [NO_NODE])
    assert window.follow([D, G]) == []
    assert links(window.send()) == ((G,), (), 0, Keep(entries=(0, 1, 3), num_committed=3))


def test_a_new_root_cancels_all_runs_and_is_sent_alone():
    window, drafts = started(), drafted()
    root, *runs = next(iter(window.runs)), window.send(drafts, [0]).number, window.send(drafts, [2]).number
    window.learn(root)
    assert window.follow([G]) == runs
    assert not window.runs
    assert not window.is_root_sent
    assert links(window.send()) == ((G,), (), 0, Keep(entries=(0,), num_committed=1))
    assert [window.learn(run) for run in runs] == [None, None]


def test_a_run_with_one_live_entry_is_never_cancelled():
    window, drafts = started(), drafted()
    root, mixed, dead = next(iter(window.runs)), window.send(drafts, [0, 1]).number, window.send(drafts, [2]).number
    window.learn(root)
    assert window.follow([C]) == [dead]
    assert window.learn(mixed) == Known([1], [], [])


def test_two_acceptances_without_a_run_between_make_one_keep():
    first = Keep(entries=(0, 2, 5, 7), num_committed=1)
    assert after(first, Keep(entries=(0, 2), num_committed=1)) == Keep(entries=(0, 2, 7), num_committed=2)
    assert after(first, Keep(entries=(0, 1, 2), num_committed=3)) == Keep(entries=(0, 2, 5, 7), num_committed=4)
