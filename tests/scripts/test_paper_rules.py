"""Rules of papers that benchmarks compare with: their formulas by worked examples, and exact texts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.models.decoding import GreedyAcceptance, RowSeeds, Sampling, SpeculativeSampling, generate, generate_pipelined
from outrider.models.decoding.growing_tree import UNREAD, GrowingTree
from outrider.models.decoding.types import NO_NODE
from outrider.models.decoding.window import Window
from outrider.models.drafters import NullDrafter, load_drafter
from outrider.models.drafters.growing_draft import LEAST_PROB
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

from ..decoded import texts_of
from ..models.decoding.streaming_toys import DRAFTERS, NUM_TOKENS, DialledDrafter, options
from ..models.decoding.toy_stages import ToyTarget

MAX_NODES = 64


@pytest.fixture
def rules(script: Callable[[str], Any]) -> Any:
    return script("bench/paper_rules")


def tree_of(*nodes: tuple[int, float]) -> GrowingTree:
    """Build a tree of (parent, estimate); nodes with children were read. Node n has token n."""
    tree = GrowingTree()
    for node, (parent, estimate) in enumerate(nodes):
        if parent != NO_NODE and tree.cache_entries[parent] == UNREAD:
            tree.mark_read(parent, node)
        tree.add(parent, [node], [estimate])
    return tree


# --- LLMCad's rule


@pytest.mark.parametrize(
    ("confidence", "num_correct", "num_all", "alpha"),
    [
        (0.25, 4, 4, 0.005),  # no error: alpha halves
        (0.25, 2, 4, 0.01 / 0.5),  # 0.25 ** (2 / 4)
        (0.125, 1, 3, 0.01 / 0.25),  # 0.125 ** (2 / 3)
        (0.001, 0, 2, 1.0),  # 10 would be no probability
        (0.0, 0, 900, 1.0),  # a confidence below the smallest float
    ],
)
def test_the_threshold_follows_formula_3(rules, confidence, num_correct, num_all, alpha):
    assert rules.next_alpha(0.01, confidence, num_correct, num_all) == pytest.approx(alpha)


def test_tokens_above_the_threshold_start_branches_and_the_likeliest_extends_one(rules):
    """root ─┬─ 0 (.5) ─┬─ 3 (.2)        2 and 4 are below the threshold; 3 is node 0's likeliest.
    ├─ 1 (.31) └─ 4 (.1)
    └─ 2 (.19)
    """
    tree = tree_of((NO_NODE, 0.5), (NO_NODE, 0.31), (NO_NODE, 0.19), (0, 0.2), (0, 0.1))
    nodes = rules.branch_nodes(tree)
    assert nodes == [0, 1, 3]
    assert rules.branch_ends(tree, nodes) == [1, 3]


def test_the_branch_that_is_owed_most_is_extended(rules):
    """M = 3 tokens. Branch 0-2: 3 x .3 / .65 - 2 = -.62; branch 1: 3 x .35 / .65 - 1 = .62.

    The arg-min of formula (1), as it is printed, would extend the branch that has most already.
    """
    tree = tree_of((NO_NODE, 0.6), (NO_NODE, 0.35), (0, 0.5))
    assert rules.owed_most(tree, [1, 2], 3) == 1
    tree = tree_of((NO_NODE, 0.65), (NO_NODE, 0.31), (0, 0.99), (1, 0.2))
    assert rules.owed_most(tree, [2, 3], 4) == 2, "4 x .644 / .706 - 2 = 1.65; 4 x .062 / .706 - 2 = -1.65"


@pytest.fixture
def confidence(rules, tiny_target_dir) -> Any:
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu", fast_linears=False))
    merge: Any = load_drafter(f"draft_model:{tiny_target_dir}", target, pace="expected", tree_nodes=MAX_NODES)
    return rules.ConfidenceMerge(merge.sources, merge.config)


def test_drafting_ends_when_the_surest_branch_is_unlikely(confidence):
    assert confidence._read_of(tree_of((NO_NODE, 0.1), (0, 0.2)), {1}, confidence.alpha) == [1], "0.02 is above the threshold"
    tree = tree_of((NO_NODE, 0.1), (0, 0.2), (1, 0.4))
    assert confidence._read_of(tree, {2}, confidence.alpha) == [], "0.008 is below it"
    assert confidence._read_of(tree, {2}, LEAST_PROB) == [2], "while the target's pass waits, drafting costs nothing"
    assert confidence._read_of(tree, set(), LEAST_PROB) == [], "all were read"


def test_the_threshold_learns_from_the_best_matching_branch(confidence):
    """root ─┬─ 0 (.6) ─── 2 (.5)  ─── 4 (.9)      The surest branch: 0-2-4, .27.
    └─ 1 (.4) ─┬─ 3 (.5)                  Accepted: node 1. Of its branches 1-5 is surer
               └─ 5 (.51)                 than 1-3; it has 2 tokens.
    """
    tree = tree_of((NO_NODE, 0.6), (NO_NODE, 0.4), (0, 0.5), (1, 0.5), (2, 0.9), (1, 0.51))
    confidence._learn(tree, [1])
    assert confidence.alpha == pytest.approx(0.01 / 0.27 ** (1 / 2))
    confidence.alpha = 0.01
    confidence._learn(tree, [0, 2, 4])
    assert confidence.alpha == 0.005


def test_texts_of_llmcads_rule_are_those_of_plain_decoding(rules, tiny_target_dir):
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu", fast_linears=False))
    merge: Any = load_drafter(f"draft_model:{tiny_target_dir}", target, pace="expected", tree_nodes=8)
    drafter = rules.ConfidenceMerge(merge.sources, merge.config)
    prompts, num_accepted = [torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9, 2, 6])], 0
    for acceptance in (GreedyAcceptance(), SpeculativeSampling(sampling=Sampling(temperature=0.7))):
        for rows in (prompts[:1], prompts):  # one tree outlives its step; a batch drafts anew
            seeds = {"generator": RowSeeds([*range(len(rows))]), "max_new_tokens": 24}
            plain, drafted = ([*generate(target, method, acceptance, rows, **seeds)] for method in (NullDrafter(), drafter))
            assert texts_of(drafted, len(rows)) == texts_of(plain, len(rows))
            num_accepted += sum(sum(step.num_accepted) for step in drafted)
    assert num_accepted > 24


# --- PipeInfer's rule


def test_a_run_has_the_next_tokens_of_the_likeliest_chain_above_the_cutoff(rules):
    """root ─┬─ 0 (.9) ─── 2 (.8) ─── 3 (.7) ─── 4 (.4)
    └─ 1 (.1)
    """
    drafts = tree_of((NO_NODE, 0.9), (NO_NODE, 0.1), (0, 0.8), (2, 0.7), (3, 0.4))
    rule, window = rules.PaperSpeculation(micro_batch=2), Window(root=5)
    window.send()

    def choose(max_depth: int = 9, has_more: bool = True) -> Any:
        return rule.choose(window, drafts, max_depth=max_depth, has_more=has_more)

    assert choose() == [0, 2]
    assert choose(max_depth=1) == [0]
    window.send(drafts, [0, 2])
    assert choose() == [3], "node 4 is below the cutoff of 0.5"
    rule.cutoff = 0.3
    assert choose() == [3, 4]
    window.send(drafts, [3])
    assert choose() == (), "a run of two may still become full"
    assert choose(has_more=False) == [4]
    rule.max_nodes = 3
    assert choose() == [], "the window is full"


def test_the_cutoff_rises_with_runs_and_falls_with_attempts_in_vain(rules):
    drafts, window = tree_of((NO_NODE, 0.6)), Window(root=5)
    rule = rules.PaperSpeculation(micro_batch=1, recovery=0.2, decay=0.06)
    run = window.send()
    rule.add_run(run)
    assert [rule.choose(window, drafts, max_depth=9, has_more=False) for _ in range(3)] == [[], [], [0]], "cutoffs .7, .64, .58"
    rule.add_run(run)
    assert rule.choose(window, drafts, max_depth=9, has_more=False) == [], "cutoff .78"
    rule.add_answer(run.number, 1)
    assert rule.choose(window, drafts, max_depth=9, has_more=False) == [0], "an acceptance starts over"


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_texts_of_pipeinfers_rule_are_those_of_plain_decoding(rules, kind, is_sampled):
    prompt = torch.tensor([[1, 2, 3]])
    plain = [*generate(ToyTarget(3, 0), NullDrafter(), prompts=prompt, max_new_tokens=2 * NUM_TOKENS, **options(is_sampled))]
    text = [token for step in plain for token in step.tokens[0]]
    for seed in range(8):
        rule = rules.PaperSpeculation(micro_batch=1 + seed % 4, cutoff=0.1, recovery=0.1 * (seed % 2), decay=0.05)
        drafter = DialledDrafter(text, seed=seed, **DRAFTERS[kind])
        new = {"max_new_tokens": NUM_TOKENS, "speculation": rule, **options(is_sampled)}
        steps = [*generate_pipelined(ToyTarget(3, seed), drafter, prompts=prompt, **new)]
        assert [token for step in steps for token in step.tokens[0]] == text[:NUM_TOKENS]
