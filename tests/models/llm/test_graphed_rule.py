"""Rules and commits that are replayed as CUDA graphs, against those of plain steps."""

import pytest
import torch

from outrider.models.decoding import (
    DraftTree,
    GreedyAcceptance,
    Prompts,
    RowSeeds,
    Sampling,
    SpeculativeSampling,
    TypicalAcceptance,
    chain_tree,
    generate,
)
from outrider.models.decoding.reading import read_acceptance, token_names
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.drafters.oracle import OracleDrafter
from outrider.models.llm import tree_cache
from outrider.models.llm.graphed_rule import GraphedRule
from outrider.models.llm.hf_target import HFTarget

from ...decoded import texts_of
from ..recorder import PoolRecorder, ReplayingRecorder

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47], [70, 71]]
NUM_NEW = 24
RULES = {
    "greedy": GreedyAcceptance(),
    "sampled": SpeculativeSampling(sampling=Sampling(temperature=0.8, top_p=0.9)),
    "typical": TypicalAcceptance(sampling=Sampling()),
}


@pytest.fixture
def recorder() -> PoolRecorder:
    return PoolRecorder()


@pytest.fixture
def graphed(target: HFTarget, recorder: PoolRecorder, monkeypatch: pytest.MonkeyPatch) -> HFTarget:
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", 8)
    return HFTarget(target.model, target.tokenizer, target.identity, cuda_graphs=True, recorder=recorder)


def steps_of(target, drafter, rule, rows=PROMPTS, limits=NUM_NEW):
    options = {"max_new_tokens": limits, "generator": RowSeeds(range(len(rows)))}
    return list(generate(target, drafter, rule, [torch.tensor(row) for row in rows], **options))


def figures(steps):
    return [(step.rows, step.tokens, step.num_accepted) for step in steps]


def answers(steps):
    return texts_of(steps, len(steps[0].rows))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rows", [PROMPTS, PROMPTS[:1]], ids=["batch", "one row"])
def test_a_replayed_rule_takes_the_steps_of_the_rule_itself(target, graphed, name, rows):
    """Trees of the target's own tokens: paths of every length are accepted, and committed."""
    plain = answers(steps_of(target, NullDrafter(), RULES[name], rows))
    drafter = OracleDrafter(plain, [1, 3, 2, 5], target.vocab_size)
    expected = steps_of(target, drafter, RULES[name], rows)
    rule = GraphedRule(RULES[name], ReplayingRecorder())
    assert figures(steps_of(graphed, drafter, rule, rows)) == figures(expected)
    assert sum(sum(step.num_accepted) for step in expected) > 10
    assert rule._decide.recorder.num_replays > 5
    assert graphed._commits.recorder.num_replays > 10


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_rows_that_leave_the_batch_keep_their_random_numbers(target, graphed, name):
    limits = [19, 4, 11, 7]
    torch.manual_seed(0)
    options = {"kind": "redrafter", "beam_width": 3, "beam_length": 3, "tree_nodes": 6}
    drafter = build_drafter(parse_drafter(options), target).double()
    expected = answers(steps_of(target, NullDrafter(), RULES[name], limits=limits))
    assert answers(steps_of(graphed, drafter, GraphedRule(RULES[name], ReplayingRecorder()), limits=limits)) == expected
    assert [len(text) for text in expected] == limits


def test_a_decision_survives_the_next_one(graphed):
    """A drafter's state keeps parts of it, and the next replay overwrites the recording's memory."""
    rule = GraphedRule(GreedyAcceptance(), ReplayingRecorder())
    prompts = Prompts.of([torch.tensor(PROMPTS[0])])
    graphed.prefill(prompts, max_new_tokens=30, max_nodes=2)
    tree = chain_tree(torch.tensor([[5, 6]]))
    output = graphed.verify(torch.tensor([3]), tree)
    first = rule(tree, output)
    before = first.numbers.clone()
    graphed.commit(tree, read_acceptance(tree, output, first, token_names([0], [[]])))
    output = graphed.verify(torch.tensor([50]), tree)
    second = rule(tree, output)
    assert rule._decide.recorder.num_replays == 2
    assert not torch.equal(second.numbers, before)
    assert torch.equal(first.numbers, before)


def test_outputs_at_changing_addresses_are_decided_without_a_recording(target):
    rule = GraphedRule(RULES["sampled"], ReplayingRecorder())
    steps_of(target, NullDrafter(), rule)
    assert len(rule._decide) == 0


def test_the_bound_of_a_trees_depth_may_exceed_its_nodes(graphed):
    """Merged trees have such bounds. The cache has room for the nodes alone."""
    graphed.prefill(Prompts.of([torch.arange(5, 12)]), max_new_tokens=5, max_nodes=3)
    assert graphed._cache.capacity == 16
    last_token, rule = torch.tensor([5]), GraphedRule(GreedyAcceptance(), ReplayingRecorder())
    for _ in range(5):
        tree = DraftTree(tokens=torch.tensor([[5, 6, 7]]), parents=torch.tensor([[-1, 0, 1]]), max_depth=8)
        output = graphed.verify(last_token, tree)
        acceptance = rule(tree, output)
        graphed.commit(tree, read_acceptance(tree, output, acceptance, token_names([0], [[]])))
        last_token = acceptance.bonus_token


def test_logits_that_are_not_numbers_are_an_error_of_replayed_decisions_too(graphed):
    rule = GraphedRule(GreedyAcceptance(), ReplayingRecorder())
    options = {"max_new_tokens": 9, "generator": RowSeeds(range(4))}
    steps = generate(graphed, NullDrafter(), rule, [torch.tensor(row) for row in PROMPTS], **options)
    next(steps), next(steps)
    length = graphed._cache.lengths.host[2]
    for buffer in graphed._cache._buffers:
        buffer[:, 2, :, :length] = torch.nan
    with pytest.raises(ValueError, match=r"not numbers \(NaN\) at token 3 of the answer in row 2 of the batch: .*target.dtype"):
        list(steps)
    assert rule._decide.recorder.num_replays > 0


def test_a_commit_is_recorded_once_for_all_lengths_of_paths(target, graphed):
    plain = answers(steps_of(target, NullDrafter(), RULES["greedy"]))
    drafter = OracleDrafter(plain, [1, 3, 2, 5], target.vocab_size)
    steps = steps_of(graphed, drafter, RULES["greedy"])
    assert {count for step in steps for count in step.num_accepted} == {0, 1, 2, 3}
    sizes = {shapes[1][0] for shapes in graphed._commits._recorded}
    assert len(graphed._commits) == len(sizes) == len({len(step.rows) for step in steps if not step.is_prefill})
