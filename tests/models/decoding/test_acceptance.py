"""Greedy acceptance on trees, against hand-made cases and a walk in plain Python."""

import numpy as np
import pytest
import torch

from outrider.models.decoding import (
    DraftTree,
    GreedyAcceptance,
    RowSeeds,
    Sampling,
    SpeculativeSampling,
    TargetOutput,
    chain_tree,
    empty_tree,
)
from outrider.models.decoding.acceptance import follow_choices
from outrider.models.decoding.reading import read_acceptance
from outrider.models.decoding.tree import accepted_path
from outrider.models.decoding.types import NO_NODE, Acceptance

BRANCHED = DraftTree(tokens=torch.tensor([[5, 6, 7, 8]]), parents=torch.tensor([[-1, -1, 0, 0]]), max_depth=2)
PADDED = DraftTree(tokens=torch.tensor([[5, NO_NODE]]), parents=torch.tensor([[-1, NO_NODE]]), max_depth=1)


@pytest.mark.parametrize(
    ("tree", "choices", "path", "bonus_token", "entry"),
    [
        # Nothing matches: the bonus token follows the last committed one.
        (BRANCHED, [9, 1, 2, 3, 4], [], 9, 0),
        # The target predicts 5 (node 0) after the last token, 8 (node 3) after node 0, 4 after node 3.
        (BRANCHED, [5, 8, 2, 3, 4], [0, 3], 4, 4),
        # No child of node 0 matches.
        (BRANCHED, [5, 9, 2, 3, 4], [0], 9, 1),
        # Node 2 holds 7, which the target predicts after node 0; but the accepted node is 1.
        (BRANCHED, [6, 7, 1, 3, 4], [1], 1, 2),
        (empty_tree(1, torch.device("cpu")), [7], [], 7, 0),
        (PADDED, [5, 4, 3], [0], 4, 1),
    ],
)
def test_the_path_of_the_targets_choices_is_accepted(tree, choices, path, bonus_token, entry):
    acceptance = follow_choices(tree, torch.tensor([choices]))
    assert acceptance.path.tolist() == [path + [NO_NODE] * (tree.max_depth - len(path))]
    assert (int(acceptance.num_accepted), int(acceptance.bonus_token), int(acceptance.entry)) == (len(path), bonus_token, entry)
    assert torch.equal(accepted_path(tree, [path]).entry, acceptance.entry)


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_a_walk_in_plain_python(seed: int):
    generator = torch.Generator().manual_seed(seed)
    num_nodes, depth = 12, 5
    parents = [-1]
    depths = [1]
    while len(parents) < num_nodes:
        parent = int(torch.randint(-1, len(parents), (), generator=generator))
        if parent == -1 or depths[parent] < depth:
            parents.append(parent)
            depths.append(1 if parent == -1 else depths[parent] + 1)
    tokens = torch.randint(0, 2, (1, num_nodes), generator=generator)
    choices = torch.randint(0, 2, (1, num_nodes + 1), generator=generator)
    tree = DraftTree(tokens=tokens, parents=torch.tensor([parents]), max_depth=depth)

    def longest(node: int) -> list[int]:
        children = [n for n, parent in enumerate(parents) if parent == node and tokens[0, n] == choices[0, node + 1]]
        return max(([child, *longest(child)] for child in children), key=len, default=[])

    acceptance = follow_choices(tree, choices)
    assert int(acceptance.num_accepted[0]) == len(longest(-1))
    path = acceptance.path[0, : int(acceptance.num_accepted[0])].tolist()
    at = -1
    for node in path:
        assert parents[node] == at
        assert tokens[0, node] == choices[0, at + 1]
        at = node
    assert acceptance.bonus_token[0] == choices[0, at + 1]


@pytest.mark.parametrize("seed", range(30))
def test_a_cpu_decides_in_lists_as_an_accelerator_does(seed: int):
    generator = torch.Generator().manual_seed(seed)
    parents = [[int(torch.randint(-1, node, (), generator=generator)) if node else -1 for node in range(9)] for _ in range(3)]
    # Siblings are different, and some tokens never chosen. The last rows have padding.
    tokens = torch.tensor([[row[:node].count(parent) for node, parent in enumerate(row)] for row in parents])
    tokens[1:, 7:] = NO_NODE
    tree = DraftTree(tokens=tokens, parents=torch.tensor(parents).where(tokens != NO_NODE, NO_NODE), max_depth=9)
    logits = torch.randn(3, 10, 3, generator=generator).round()  # some are equally large
    logits[0, 1 + seed % 9] = torch.nan if seed % 2 else torch.inf
    output = TargetOutput(logits=logits, hidden_states=torch.zeros(3, 10, 1))
    peaks, choices = logits.max(-1)
    one, other = follow_choices(tree, choices, peaks), GreedyAcceptance()(tree, output)
    for name in ("path", "num_accepted", "entry", "bonus_token"):
        assert torch.equal(getattr(one, name), getattr(other, name))

    def read(acceptance: Acceptance) -> tuple[object, ...]:
        try:
            read = read_acceptance(tree, output, acceptance, lambda row, place: f"{row} {place}")
        except ValueError as error:
            return (str(error),)
        return read.host_nodes, read.tokens, read.next_tokens, read.entries.tolist()

    assert read(one) == read(other)


@pytest.mark.parametrize(("rows", "vocab"), [(16, 9), (17, 4096), (17, 9)])
def test_a_cpu_draws_on_the_way_unless_there_are_many_rows_of_few_tokens(rows: int, vocab: int):
    tree = chain_tree(torch.randint(vocab, (rows, 1), generator=torch.Generator().manual_seed(1)))
    output = TargetOutput(
        logits=torch.randn(rows, 2, vocab, generator=torch.Generator().manual_seed(2)), hidden_states=torch.zeros(rows, 2, 1)
    )
    rule, seeds = SpeculativeSampling(sampling=Sampling()), RowSeeds(range(rows))
    one = rule(tree, output, generator=seeds)
    other = rule(tree, output, generator=RowSeeds.of_rows(seeds.rows(tree.tokens.device)))
    assert (one.numbers is None) == (rows == 17 and vocab == 9)
    assert torch.equal(one.bonus_token, other.bonus_token)


@pytest.mark.parametrize("rule", [GreedyAcceptance(), SpeculativeSampling(sampling=Sampling())])
def test_logits_may_have_a_gradient_and_no_rows(rule):
    logits = torch.randn(1, 1, 5, requires_grad=True)
    output = TargetOutput(logits=logits, hidden_states=torch.zeros(1, 1, 1))
    assert rule(empty_tree(1, logits.device), output, generator=RowSeeds([1])).bonus_token.shape == (1,)
    nothing = TargetOutput(logits=torch.zeros(0, 1, 5), hidden_states=torch.zeros(0, 1, 1))
    assert rule(empty_tree(0, logits.device), nothing, generator=RowSeeds([])).bonus_token.shape == (0,)


def test_seeds_and_positions_may_be_numbers_of_any_library():
    probs = torch.full((9,), 1 / 9)
    tokens = [RowSeeds([5, 7], [3, 4]).draw(row, 1, probs) for row in range(2)]
    for convert in (np.array, torch.tensor):
        seeds = RowSeeds(convert([5, 7]), convert([3, 4]))
        assert [seeds.draw(row, 1, probs) for row in range(2)] == tokens
    with pytest.raises(ValueError, match="3 positions for 2 seeds; give one per seed"):
        RowSeeds([5, 7], [1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 8.0, torch.nan])
def test_a_draw_on_the_host_is_that_of_all_clocks(sharpness: float, dtype: torch.dtype):
    random, seeds = torch.Generator().manual_seed(1), RowSeeds([3], [2])
    for depth in range(60):
        probs = (sharpness * torch.randn(5000, generator=random, dtype=dtype)).softmax(-1)
        expected = seeds.choose(probs[None, None], torch.tensor([[depth]]), depth)
        assert seeds.draw(0, depth, probs) == expected.item()


def test_greedy_takes_the_arg_max_row_by_row():
    logits = torch.zeros(2, 3, 4)
    logits[0, 0, 1] = logits[0, 1, 2] = logits[0, 2, 3] = 1.0  # row 0: 1, then 2, then 3
    logits[1, 0, 3] = 1.0  # row 1: 3 at once
    tree = chain_tree(torch.tensor([[1, 2], [1, 2]]))
    acceptance = GreedyAcceptance()(tree, TargetOutput(logits=logits, hidden_states=torch.zeros(2, 3, 1)))
    assert acceptance.num_accepted.tolist() == [2, 0]
    assert acceptance.bonus_token.tolist() == [3, 3]
    assert GreedyAcceptance.lossless
