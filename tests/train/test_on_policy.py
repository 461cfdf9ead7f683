"""Positions where the drafter starts a step of decoding: `train.on_policy_every`."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.data.collate import text_continuations
from outrider.data.types import UNKNOWN, DistilledExample, DrafterBatch, Example
from outrider.models.decoding import GreedyAcceptance, RowSeeds, generate
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.objective import Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.train.batches import target_reads, with_hidden_states
from outrider.train.config import TrainConfig
from outrider.train.missed_by import TrainedCounter
from outrider.train.on_policy import fill_up, next_starts, sample, step_starts

from ..wrong_values import problems
from .conftest import Run
from .test_missed_by import KINDS, make_batch, trained_a_little
from .test_run import records, weights

RunTrain = Callable[..., Run]
ON_POLICY: dict[str, Any] = {"max_positions": 20, "on_policy_every": 2, "on_policy_share": 0.5}
ANSWER_TOKENS = 24


def answers(target: HFTarget) -> list[DistilledExample]:
    """Let the target answer three prompts; the labels are its own next tokens."""
    prompts = [torch.arange(3, 9), torch.arange(20, 31), torch.tensor([5, 40, 7])]
    tokens: list[list[int]] = [[] for _ in prompts]
    rule, seeds = GreedyAcceptance(), RowSeeds(range(3))
    for step in generate(target, NullDrafter(), rule, prompts, max_new_tokens=ANSWER_TOKENS, stop_ids=(), generator=seeds):
        for row, new in zip(step.rows, step.tokens, strict=True):
            tokens[row] += new
    examples = []
    for number, (prompt, answer) in enumerate(zip(prompts, tokens, strict=True)):
        input_ids = torch.cat([prompt, torch.tensor(answer)])
        loss_mask = torch.arange(len(input_ids)) >= len(prompt)
        example = Example(id=str(number), input_ids=input_ids, loss_mask=loss_mask)
        continuations = text_continuations(input_ids, loss_mask, 8)
        examples.append(DistilledExample(example=example, continuations=continuations))
    return examples


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "redrafter")) for kind in KINDS])
def test_a_walk_starts_its_steps_where_decoding_does(kind: str, packing: bool, target: HFTarget) -> None:
    examples = answers(target)
    drafter = trained_a_little(kind, target, make_batch(examples, packing=False))
    batch = with_hidden_states(make_batch(examples, packing=packing), target, target_reads(drafter, Objective()))
    starts = torch.zeros_like(batch.input_ids) if batch.starts is None else batch.starts
    counter = TrainedCounter(drafter, target)
    num_accepted = 0
    for example in examples:
        # 1. Where the steps of decoding start: after the last token that the target has read.
        text = example.example.input_ids.tolist()
        length = int((~example.example.loss_mask).sum())
        expected, read = [], length - 1
        rule, seeds, prompts = GreedyAcceptance(), RowSeeds(range(1)), [example.example.input_ids[:length]]
        for step in generate(target, drafter, rule, prompts, max_new_tokens=ANSWER_TOKENS, stop_ids=(), generator=seeds):
            if not step.is_prefill:
                expected.append(read)
                read += len(step.tokens[0])
                num_accepted += len(step.tokens[0]) - 1
        # 2. The same by a walk through the text.
        first = {(row, int(starts[row, column])) for row, column in batch.attention_mask.nonzero().tolist()}
        row, origin = next(place for place in first if batch.input_ids[place[0], place[1] :][: len(text)].tolist() == text)
        walk, found = torch.zeros_like(batch.positions), []
        walk[row, origin + length - 1] = True
        while walk.any():
            found.append(int(walk.nonzero()[0, 1]) - origin)
            walk = next_starts(replace(batch, positions=walk), counter.count(replace(batch, positions=walk))) & batch.positions
        # The last labels end with the text, so its last steps may differ.
        assert found[: len(expected) - 1] == expected[:-1]
        assert len(expected) > 3
    assert num_accepted > 3, "a drafter that is always wrong would also pass"


def test_a_walk_leaves_no_text_and_follows_the_text_where_the_target_does_not() -> None:
    positions = torch.zeros(1, 10, dtype=torch.bool)
    positions[0, [1, 3, 7]] = True
    continuations = torch.full((1, 10, 3), UNKNOWN)
    continuations[0, 1] = torch.tensor([2, 3, 4])  # all on the text
    continuations[0, 3] = torch.tensor([4, 9, 9])  # leaves it after one token
    continuations[0, 7] = torch.tensor([8, 9, UNKNOWN])  # up to the text's end
    batch = DrafterBatch(
        input_ids=torch.arange(10)[None],
        attention_mask=torch.ones_like(positions),
        positions=positions,
        continuations=continuations,
    )
    assert next_starts(batch, torch.tensor([2, 2, 0])).nonzero()[:, 1].tolist() == [4, 5, 8]
    assert next_starts(batch, torch.tensor([0, 0, 1])).nonzero()[:, 1].tolist() == [2, 4, 9]
    starts = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0, 8, 8]])
    assert next_starts(replace(batch, starts=starts), torch.tensor([2, 2, 1])).nonzero()[:, 1].tolist() == [4, 5]


def test_a_step_has_at_most_the_share_of_on_policy_positions_and_fills_up_with_others(
    target: HFTarget, examples: list[DistilledExample]
) -> None:
    batch = make_batch(examples[:6], packing=False)
    drafter = trained_a_little("redrafter", target, batch)
    batch = with_hidden_states(batch, target, target_reads(drafter, Objective()))
    config = TrainConfig(steps=2, **ON_POLICY)
    starts = step_starts(TrainedCounter(drafter, target), batch, config, 3)
    assert 3 < int(starts.sum()) <= 10
    filled = fill_up(batch, starts, config, 3)
    assert int(filled.positions.sum()) == 20
    assert (filled.positions & starts).equal(starts)
    assert not (filled.positions & ~batch.positions).any()
    assert int(sample(batch.positions, 10**6, 0).sum()) == int(batch.positions.sum()), "a small batch trains all it has"
    assert not sample(batch.positions, 5, 0).equal(sample(batch.positions, 5, 1))


def test_an_on_policy_run_resumes_to_equal_bits_and_counts_its_positions(run_train: RunTrain) -> None:
    whole = run_train("whole", **ON_POLICY)
    seen = [record.get("on_policy_positions_seen", 0) for record in records(whole)]
    assert seen[0] == 0
    assert 0 < seen[1] == seen[2] < seen[3] == seen[4] < seen[5] <= 3 * 10
    assert [record["positions_seen"] for record in records(whole)] == [20 * step for step in range(1, 7)]
    resumed = run_train("resumed", **ON_POLICY)
    for number in (4, 5, 6):
        shutil.rmtree(resumed.train_dir / "checkpoints" / f"step-{number:08}", ignore_errors=True)
    shutil.rmtree(resumed.drafter_dir)
    (resumed.train_dir / "summary.json").unlink()
    run_train("resumed", **ON_POLICY)
    uniform = run_train("uniform", max_positions=20)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(resumed).items())
    assert not all(torch.equal(value, weights(whole)[name]) for name, value in weights(uniform).items())


def test_impossible_choices_are_refused_before_training(run_train: RunTrain) -> None:
    (problem,) = problems(TrainConfig, steps=5, on_policy_every=2)
    assert problem.startswith("on_policy_every is 2, and max_positions is null")
    (problem,) = problems(TrainConfig, steps=5, on_policy_every=1, max_positions=10, on_policy_share=0.05)
    assert problem.startswith("on_policy_share is 0.05 and max_positions 10, so no position is chosen")
    assert TrainConfig(steps=5, on_policy_every=1, max_positions=100, on_policy_share=0.29).num_on_policy == 29
    (problem,) = problems(TrainConfig, steps=5, on_policy_share=0.5)
    assert problem.startswith("on_policy_share is 0.5, and on_policy_every is null")
    with pytest.raises(ValueError, match=r"drafter\.temperature is 0\.7.*drawn at random"):
        run_train(**ON_POLICY, replace_drafter={"kind": "draft_model", "num_layers": 1, "temperature": 0.7})
