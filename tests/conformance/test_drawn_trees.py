"""Drawn trees of groups of siblings: every outcome is enumerated, and trees that look ahead fail.

The search is a draft model's; EAGLE's draws in the same way. The model is a table.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from outrider.models.decoding import Sampling, SpeculativeSampling, TargetOutput
from outrider.models.decoding.tree import DraftTree, Drawn
from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters import group_search
from outrider.models.drafters.beams import likeliest_nodes, take
from outrider.models.drafters.draft_model_search import draw_tree
from outrider.models.drafters.group_search import GroupDrawing, GroupSearch, pack_groups
from outrider.models.drafters.vocabulary import DraftVocabulary

from ..rules.enumerate_rules import (
    EXACT,
    ScriptedChance,
    add_emissions,
    complete_emissions,
    total_variation,
)
from ..rules.toy_models import adversarial_drafters, joint, random_tables

VOCAB, LENGTH = 3, 4
CAUGHT = 1e-4
"""Total variation that a broken drawing must exceed."""


def table_logits(tables, tree) -> torch.Tensor:
    """Return a toy model's logits after the last token and each node of a tree."""
    logits = tables[0].expand(len(tree.tokens), 1 + tree.num_nodes, -1).clone()
    for node, depth in itertools.product(range(tree.num_nodes), range(1, tree.max_depth + 1)):
        rows = (tree.depths[:, node] == depth).nonzero()[:, 0]
        path = tree.tokens[rows].gather(1, tree.lineage[rows, node, :depth].flip(1))
        logits[rows, node + 1] = tables[depth][tuple(path.T)]
    return logits


def draw_trees(tables, num_rows: int, generator, *, num_groups: int, temperature: float = 1.0):
    """Draw trees as a draft model does: `num_groups` groups of two, below two nodes of each depth."""
    drawing = GroupDrawing(temperature=temperature, num_children=2, vocabulary=DraftVocabulary(size=VOCAB), generator=generator)
    search = draw_tree(
        drawing,
        tables[0].expand(num_rows, 1, -1),
        lambda tree, num_read: table_logits(tables, tree)[:, num_read:],
        top_k=2,
        depth=3,
        num_groups=num_groups,
    )
    return pack_groups(search, 2 * num_groups)


class EveryDraw:
    """Source of draws with a row for each outcome of `num_draws` draws, and its probability."""

    def __init__(self, num_draws: int) -> None:
        self.outcomes = torch.tensor(list(itertools.product(range(VOCAB), repeat=num_draws)))
        self.weight = torch.ones(len(self.outcomes), dtype=torch.float64)
        self.num_drawn = 0

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        first, self.num_drawn = self.num_drawn, self.num_drawn + probs.shape[1]
        tokens = self.outcomes[:, first : self.num_drawn]
        self.weight *= (probs.gather(2, tokens[..., None])[..., 0] / probs.sum(-1)).nan_to_num(0.0).prod(1)
        return tokens

    def flip(self, probs: torch.Tensor) -> torch.Tensor:
        raise AssertionError("drafting flips no coins")


def distance(target, drafter, *, temperature: float = 1.0, num_groups: int = 3) -> float:
    """Return the total variation of a step's tokens from the target's, over all trees and choices."""
    # 1. All trees: two children of the last token, then of two nodes at each depth.
    chance = EveryDraw(2 + 4 * (min(num_groups, 3) - 1))
    tree = draw_trees(drafter, len(chance.outcomes), chance, num_groups=num_groups, temperature=temperature)
    assert chance.num_drawn == chance.outcomes.shape[1]
    assert tree.num_nodes == 2 * num_groups
    assert float(chance.weight.sum()) == pytest.approx(1.0)
    # 2. Drop impossible trees.
    possible = chance.weight > 0
    weight, drawn = chance.weight[possible], replace(tree.drawn, probs=tree.drawn.probs[possible])
    tree = DraftTree(tokens=tree.tokens[possible], parents=tree.parents[possible], max_depth=tree.max_depth, drawn=drawn)
    # 3. All choices of the rule.
    sampling, logits = Sampling(temperature=temperature), table_logits(target, tree)
    output, rule = TargetOutput(logits=logits, hidden_states=logits[..., :0]), SpeculativeSampling(sampling=sampling)
    length = tree.max_depth + 1
    emitted = [torch.zeros(VOCAB**size, dtype=torch.float64) for size in range(length + 1)]
    script: list[int] | None = []
    while script is not None:
        choices = ScriptedChance(script, len(logits))
        acceptance = rule(tree, output, generator=choices)
        add_emissions(emitted, tree.tokens, acceptance, weight * choices.weight, VOCAB)
        script = choices.next_script()
    return total_variation(complete_emissions(emitted, target, sampling, length), joint(target, sampling, length))


@pytest.mark.parametrize(
    ("name", "num_groups", "temperature"),
    [
        ("unrelated", 2, 1.0),
        ("too sure", 2, 0.5),
        pytest.param("unrelated", 3, 1.0, marks=pytest.mark.slow),
    ],
)
def test_whole_groups_give_the_targets_distribution(name, num_groups, temperature):
    target = random_tables(VOCAB, LENGTH, seed=0)
    drafter = adversarial_drafters(target, seed=1)[name]
    assert distance(target, drafter, temperature=temperature, num_groups=num_groups) < EXACT


def by_the_first_child(search, num_groups, num_children):
    """Keep the groups whose first children are the likeliest: this looks at the draws."""
    below_root = search.parents[:, ::num_children] == NO_NODE
    scores = search.scores[:, ::num_children].masked_fill(below_root, 0.0)
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :num_groups].sort(dim=1).values


def likeliest_draws(search, groups, num_children):
    """Keep the most probable nodes, as EAGLE-2 does with its own trees: groups are split."""
    nodes = likeliest_nodes(search, groups.shape[1] * num_children)
    tree, rows = take(search, nodes), torch.arange(len(nodes))[:, None]
    drawn_from = search.drawn_from[rows, nodes // num_children]
    columns = (tree.parents + 1)[..., None].expand_as(drawn_from)
    probs = torch.zeros(len(nodes), 1 + nodes.shape[1], VOCAB, dtype=drawn_from.dtype).scatter(1, columns, drawn_from)
    return replace(tree, drawn=Drawn(probs=probs, max_children=num_children))


def untempered(self, logits, children=GroupDrawing.children):
    """Record another distribution than that of the draws."""
    drawn = children(self, logits)
    self._probs[-1] = self._probs[-1].sqrt() / self._probs[-1].sqrt().sum(-1, keepdim=True)
    return drawn


def sorted_by_probability(self, logits, children=GroupDrawing.children):
    """Try the likeliest draw first, not the first draw."""
    tokens, log_probs = children(self, logits)
    order = log_probs.argsort(dim=-1, descending=True)
    return tokens.gather(-1, order), log_probs.gather(-1, order)


@pytest.mark.parametrize(
    ("place", "name", "broken"),
    [
        (group_search, "likeliest_groups", by_the_first_child),
        (group_search, "tree_of_groups", likeliest_draws),
        (GroupDrawing, "children", untempered),
        (GroupDrawing, "children", sorted_by_probability),
    ],
    ids=["by the first child", "likeliest draws", "untempered", "sorted by probability"],
)
def test_drawing_that_looks_at_the_draws_is_caught(place, name, broken, monkeypatch):
    monkeypatch.setattr(place, name, broken)
    target, drafter = random_tables(VOCAB, LENGTH, seed=0), random_tables(VOCAB, LENGTH, seed=1)
    assert distance(target, drafter, num_groups=2) > CAUGHT


def test_a_drawn_tree_keeps_groups_whole_and_takes_the_most_probable_parents():
    """Of the groups of nodes 0, 1, 2 and 3, those of the root, of 0 (0.6) and of 2 (0.36) stay."""
    tables = [torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log().expand([VOCAB] * (size + 1)) for size in range(LENGTH)]
    tree = draw_trees(tables, 50, torch.Generator().manual_seed(0), num_groups=3)
    assert tree.drawn is not None
    assert tree.num_nodes == 6
    assert torch.equal(tree.parents[:, ::2], tree.parents[:, 1::2]), "a group of siblings was split"
    usual = (tree.tokens[:, :4] == torch.tensor([0, 1, 0, 1])).all(1)
    assert usual.any()
    assert tree.parents[usual].unique(dim=0).tolist() == [[-1, -1, 0, 0, 2, 2]]
    # Nodes with children have been read, behind the last token: 0 first, then 2.
    assert tree.entries[usual][:, [0, 2]].unique(dim=0).tolist() == [[1, 3]]


def test_a_reduced_vocabulary_draws_its_own_tokens_and_records_no_probability_of_others():
    vocabulary = DraftVocabulary(size=6, tokens=torch.tensor([1, 3, 4]))
    drawing = GroupDrawing(temperature=1.0, num_children=2, vocabulary=vocabulary, generator=torch.Generator().manual_seed(0))
    search = GroupSearch(40, torch.device("cpu"))
    logits = torch.tensor([2.0, 1.0, 0.0]).expand(40, 1, -1)
    search.add(*drawing.children(logits))
    tree = pack_groups(drawing.drawn(search.tree()), 2)
    assert set(tree.tokens.flatten().tolist()) == {1, 3, 4}
    assert (tree.tokens[:, 0] != tree.tokens[:, 1]).all()
    expected = torch.zeros(40, 6).index_copy(1, vocabulary.tokens, logits[:, 0].softmax(-1))
    assert torch.allclose(tree.drawn.probs[:, 0], expected)
    assert not tree.drawn.probs[:, 1:].any()
    assert tree.drawn.max_children == 2
