"""The rule of growing trees, on chains whose best length is known."""

import ast
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean

import pytest

from outrider.models.decoding import growing_tree, growth, pacing
from outrider.models.decoding.growing_tree import GrowingTree
from outrider.models.decoding.growth import LEAST_PROB, ExpectedRule
from outrider.models.decoding.types import NO_NODE

MAX_NODES = 64
HARMLESS = {"bisect", "collections", "collections.abc", "dataclasses", "heapq", "itertools", "math", "statistics", "typing"}


def tree_of(*nodes: tuple[int, float]) -> GrowingTree:
    """Build a tree of (parent, estimate); nodes with children were read."""
    tree = GrowingTree()
    for entry, (parent, estimate) in enumerate(nodes):
        if parent != NO_NODE and tree.entries[parent] == growing_tree.UNREAD:
            tree.mark_read(parent, entry)
        tree.add(parent, [entry], [estimate])
    return tree


# --- decoding in virtual time


@dataclass
class Run:
    """What the rule did on chains."""

    tokens: int = 0
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def decode(
    rule: ExpectedRule,
    acceptances: Callable[[random.Random], float],
    pass_seconds: Callable[[int], float],
    *,
    steps: int = 500,
    draft_seconds: Callable[[int], float] = lambda step: 1.0,
    confidence: Callable[[float], float] = lambda acceptance: acceptance,
) -> Run:
    """Decode with chains; each draft token's acceptance is drawn, and the drafter knows it."""
    rng, run = random.Random(0), Run()
    for step in range(steps):
        tree, truth, drafting, num_drafts = GrowingTree(), [], 0.0, 0
        while (reads := rule.reads([tree])[0]) and num_drafts < 400:
            assert reads == [len(tree) - 1], "a chain has one unread node"
            if len(tree):
                tree.mark_read(len(tree) - 1, len(tree))
            acceptance = acceptances(rng)
            truth.append(rng.random() < acceptance)
            tree.add(len(tree) - 1, [0], [confidence(acceptance)])
            drafting += float(draft_seconds(step))
            rule.add_draft([tree], [reads], float(draft_seconds(step)))
            num_drafts += 1
        sent = rule.sends([tree])
        accepted: list[int] = []
        for node in sent[0]:
            if not truth[node]:
                break
            accepted.append(node)
        verifying = float(pass_seconds(len(sent[0])))
        rule.add_step([tree], sent, [accepted], drafting, verifying)
        if step >= 50:
            run.tokens += 1 + len(accepted)
            run.seconds += drafting + verifying
            run.lengths.append(num_drafts)
    return run


def best_length(acceptance: float, ratio: float) -> tuple[int, float]:
    """Return the length of a chain that has most tokens per second, and these: closed form."""
    rates = {n: (1 - acceptance ** (n + 1)) / (1 - acceptance) / (n + ratio) for n in range(300)}
    return max(rates.items(), key=lambda item: item[1])


@pytest.mark.parametrize(("acceptance", "ratio"), [(0.3, 2), (0.3, 200), (0.6, 37), (0.8, 10), (0.8, 200), (0.95, 2)])
def test_chains_of_constant_acceptance_have_the_best_length(acceptance, ratio):
    length, rate = best_length(acceptance, ratio)
    run = decode(ExpectedRule(400, 1), lambda rng: acceptance, lambda n: ratio)
    assert mean(run.lengths) == pytest.approx(length, abs=1 + 0.1 * length)
    assert run.rate >= 0.93 * rate, "the noise of the drawn tokens is 4 %"


def easy_and_hard(rng: random.Random) -> float:
    return 0.95 if rng.random() < 0.8 else 0.2


@pytest.mark.parametrize("ratio", [3, 37, 200])
def test_tokens_of_unequal_difficulty_gain_over_the_best_fixed_length(ratio):
    _, rate = best_length(0.8 * 0.95 + 0.2 * 0.2, ratio)
    assert decode(ExpectedRule(400, 1), easy_and_hard, lambda n: ratio).rate >= 0.95 * rate


def test_more_is_drafted_for_an_expensive_pass():
    cheap, dear = (decode(ExpectedRule(400, 1), easy_and_hard, lambda n, r=ratio: r, steps=200) for ratio in (3, 1000))
    assert mean(dear.lengths) > 3 * mean(cheap.lengths)


def test_nodes_that_cost_as_much_as_a_pass_are_not_verified():
    """At 80 % acceptance a chain pays if nodes are free, and hardly if each takes half a pass."""
    free = decode(ExpectedRule(400, 1), lambda rng: 0.8, lambda n: 10.0)
    dear = decode(ExpectedRule(400, 1), lambda rng: 0.8, lambda n: 10.0 + 5.0 * n)
    assert mean(free.lengths) > 4
    assert mean(dear.lengths) < 2


def test_drafting_stops_where_it_never_pays_and_is_tried_again():
    """The drafter claims 90 % and is never right; later it is."""
    run = decode(ExpectedRule(400, 1), lambda rng: 0.0, lambda n: 2.0, confidence=lambda acceptance: 0.9)
    assert mean(run.lengths) < 0.2
    rule = ExpectedRule(400, 1)
    decode(rule, lambda rng: 0.0, lambda n: 2.0, confidence=lambda acceptance: 0.9)
    assert mean(decode(rule, lambda rng: 0.9, lambda n: 2.0).lengths) > 1


def test_a_slow_first_pass_does_not_end_drafting():
    """Kernels are loaded in the first pass, which then takes a thousand times as long."""
    slow = decode(ExpectedRule(400, 1), lambda rng: 0.8, lambda n: 10.0, draft_seconds=lambda step: 1.0 + 999.0 * (step == 0))
    assert mean(slow.lengths) > 3
    stalls = decode(ExpectedRule(400, 1), lambda rng: 0.8, lambda n: 10.0, draft_seconds=lambda step: 1 + 999 * (step < 4))
    assert mean(stalls.lengths[-200:]) > 3


def test_a_stall_changes_the_next_steps_little():
    rule = ExpectedRule(400, 1)
    decode(rule, lambda rng: 0.8, lambda n: 10.0, steps=200)
    before = rule.rate
    tree = tree_of((NO_NODE, 0.8))
    rule.add_step([tree], [[0]], [[]], 5000.0, 9000.0)
    assert rule.rate > 0.9 * before


# --- trees and batches


def grown(rule: ExpectedRule, pass_seconds: float = 100.0, rows: int = 1, steps: int = 4) -> list[GrowingTree]:
    """Let a rule take some steps with trees of two children a node, and return the last trees."""
    for _ in range(steps):
        trees = [GrowingTree() for _ in range(rows)]
        while any(reads := rule.reads(trees)):
            for tree, nodes in zip(trees, reads, strict=True):
                for node in nodes:
                    if node != NO_NODE:
                        tree.mark_read(node, len(tree))
                    tree.add(node, [0, 1], [0.6, 0.2])
            rule.add_draft(trees, reads, 1.0)
        sent = rule.sends(trees)
        rule.add_step(trees, sent, [[] for _ in trees], 1.0, pass_seconds)
    return trees


def test_the_first_steps_measure_a_small_tree():
    rule = ExpectedRule(MAX_NODES, 4)
    assert len(grown(rule, steps=1)[0]) == 2
    assert len(grown(rule, steps=4)[0]) > 8


def test_all_nodes_are_sent_while_they_cost_nothing():
    rule = ExpectedRule(MAX_NODES, 4)
    trees = grown(rule)
    (sent,) = rule.sends(trees)
    assert sent == trees[0].first(min(len(trees[0]), MAX_NODES))
    small = ExpectedRule(5, 4)
    (sent,) = small.sends(grown(small))
    assert len(sent) <= 5


def test_a_draft_pass_reads_at_most_top_k_nodes_the_likeliest_first():
    rule = ExpectedRule(MAX_NODES, 3)
    trees = grown(rule, steps=3)
    tree = GrowingTree()
    tree.add(NO_NODE, range(6), [0.3, 0.2, 0.2, 0.1, 0.1, 0.05])
    assert rule.reads([tree]) == [tree.unread(3)]
    assert len(trees[0]) > 3


def test_a_batch_reads_for_all_rows_and_sends_equally_many_nodes():
    rule = ExpectedRule(MAX_NODES, 4)
    trees = grown(rule, rows=3)
    sent = rule.sends(trees)
    assert len({len(nodes) for nodes in sent}) == 1
    sure, hopeless = tree_of((NO_NODE, 0.9)), tree_of((NO_NODE, 1e-9))
    assert rule.reads([sure, hopeless])[0] == [0], "the pass pays for one row"
    assert rule.reads([hopeless, hopeless]) == [[], []]


def test_a_waiting_pass_reads_what_fits_the_wait():
    rule = ExpectedRule(MAX_NODES, 2)
    (tree,) = grown(rule)
    assert rule.spare_reads(tree, 0.5) == [], "a draft pass takes 1 second"
    assert rule.spare_reads(tree, 1.5) == tree.unread(2)
    assert rule.spare_reads(tree_of((NO_NODE, LEAST_PROB / 2)), 1.5) == []
    assert rule.spare_reads(GrowingTree(), 1.5) == [NO_NODE]


def test_the_rule_reads_neither_a_clock_nor_random_numbers():
    """Then trees would depend on the draws of tokens to come, or tests on the machine's load."""
    modules: Sequence = (growth, pacing, growing_tree)
    for module in modules:
        imported = set()
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module)
        assert imported <= HARMLESS, module
    assert len(modules) == 3
