"""What a new kind of drafter needs: one module, with one method that drafts and one that is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.types import UNKNOWN, DrafterBatch
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import (
    DRAFTERS,
    NullDrafter,
    build_drafter,
    load_drafter,
    parse_drafter,
    save_drafter,
)
from outrider.models.drafters.base import TrainableDrafter
from outrider.models.drafters.graphed import graphed
from outrider.models.drafters.merged import MergedConfig, MergedDrafter
from outrider.models.drafters.objective import Objective

from ...decoded import texts_of
from ..recorder import ReplayingRecorder
from . import minimal_kind

PROMPTS = [[1, 70, 71, 72, 2], [9, 8]]
NUM_NEW, HORIZON = 16, 5


def decode(target, drafter) -> tuple[list[list[int]], int]:
    """Return the answers, and the number of steps."""
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    steps = [*generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=NUM_NEW)]
    return texts_of(steps, len(PROMPTS)), len(steps)


def distilled(target, answers: list[list[int]]) -> DrafterBatch:
    """Return the answers as texts with the continuations that they have themselves."""
    texts = torch.tensor([answer[: NUM_NEW + 2] for answer in answers])
    continuations = torch.full((*texts.shape, HORIZON), UNKNOWN)
    for column in range(texts.shape[1] - 1):
        known = texts[:, column + 1 : column + 1 + HORIZON]
        continuations[:, column, : known.shape[1]] = known
    return DrafterBatch(
        input_ids=texts,
        attention_mask=torch.ones_like(texts, dtype=torch.bool),
        positions=continuations[:, :, 0] != UNKNOWN,
        continuations=continuations,
        hidden_states=target.hidden_states(texts)[0].float(),
    )


@pytest.fixture
def trained(target, monkeypatch) -> Any:
    monkeypatch.setitem(DRAFTERS, "pairs", minimal_kind.Pairs)
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": "pairs"}), target).train()
    answers, _ = decode(target, NullDrafter())
    batch = distilled(target, [[*prompt, *answer][-NUM_NEW - 2 :] for prompt, answer in zip(PROMPTS, answers, strict=True)])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-2)
    for _ in range(60):
        loss = drafter.loss(batch, Objective())
        optimizer.zero_grad()
        (loss.sums.sum() / loss.counts.sum()).backward()
        optimizer.step()
    return drafter.to(target.dtype).eval().requires_grad_(False)


def test_a_minimal_kind_is_one_small_module_that_trains_saves_and_decodes(target, trained, tmp_path):
    assert sum(map(bool, Path(minimal_kind.__file__).read_text().split("\n"))) <= 60
    expected, num_plain = decode(target, NullDrafter())
    save_drafter(trained, tmp_path, target.identity)
    answers, num_steps = decode(target, load_drafter(tmp_path, target))
    assert answers == expected
    assert num_steps < 0.6 * num_plain


def test_a_minimal_kind_can_be_recorded_and_merged(target, trained):
    expected, num_plain = decode(target, NullDrafter())
    recorder = ReplayingRecorder()
    merge = MergedDrafter(
        {"pairs": trained, "suffix": load_drafter("suffix", target)}, MergedConfig(tree_nodes=9, pace="fixed")
    )
    for drafter in (graphed(trained, recorder), graphed(merge, recorder)):
        num_replays = recorder.num_replays
        answers, num_steps = decode(target, drafter)
        assert answers == expected
        assert num_steps < 0.6 * num_plain
        assert recorder.num_replays > num_replays


@pytest.mark.parametrize("member", ["max_nodes", "init_state", "search", "skip", "advance", "select", "loss"])
def test_a_kind_without_a_required_member_cannot_be_built(member):
    """A forgotten member once was the protocol's, which returns None."""
    members = dict.fromkeys({"for_target", "max_nodes", "init_state", "search", "skip", "advance", "select", "loss"} - {member})
    with pytest.raises(TypeError, match=f"abstract method '?{member}'?"):
        type("Forgetful", (TrainableDrafter,), members)()
