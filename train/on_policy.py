"""Positions to train where the drafter starts a step of decoding: `train.on_policy_every`.

Uniform positions are not those that decoding meets. A step starts after a token that the last draft
missed, so mostly where drafting is hard. Greedy decoding commits the target's own text, whatever is
drafted. So the steps of the current drafter in a labelled text follow from its proposals there:

    text   a b c d e f     after `a` the target has chosen b, and the drafter proposes c d x
                           committed: b c d, and e, which the draft missed; the next step starts after d

A walk starts at a random labelled position and takes WALK_STEPS such steps. Where it ends, a draft
was rejected just before. Nothing else is decoded or labelled: the labels there are the shards' own.
Where the target's continuation leaves the text, the walk continues after the text's own token. Steps
longer than the labels count as long as the labels.

This differs from distillation on the drafter's own samples (arXiv 2310.08461), whose contexts hold
the drafter's tokens. Speculative decoding never keeps a wrong token in the context.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int

from ..data.types import UNKNOWN, DrafterBatch
from .batches import derived_seed, with_hidden_states
from .config import TrainConfig
from .missed_by import TrainedCounter
from .setup import Training

WALK_STEPS = 2
"""Steps of a walk. Walks from different starts soon meet, and then go on as decoding does."""


def choose_on_policy(training: Training, step: int, batches: Sequence[DrafterBatch]) -> tuple[Sequence[DrafterBatch], int]:
    """Choose the positions to train of a step's micro-batches, if the step is on-policy.

    Also returns the number of positions where a step starts. The batches of an on-policy step have
    all their labelled positions. All processes must call this together, each with its own batches.
    The choice depends on weights, seed and step, so a resumed run makes the same one.
    """
    config = training.config
    if not config.is_on_policy(step):
        return batches, 0
    started, chosen, total = time.perf_counter(), [], 0
    with training.whole_drafter() as drafter:
        was_training = drafter.training
        drafter.eval()
        try:
            for micro, batch in enumerate(batches):
                seed = derived_seed(config.seed, "on_policy", step, micro, training.accelerator.process_index)
                batch = with_hidden_states(batch, training.target, training.reads)
                starts = step_starts(TrainedCounter(drafter, training.target), batch, config, seed)
                chosen.append(fill_up(batch, starts, config, seed))
                total += int(starts.sum())
        finally:
            drafter.train(was_training)
    training.meter.on_policy_seconds += time.perf_counter() - started
    return chosen, total


@torch.no_grad()
def step_starts(
    counter: TrainedCounter, batch: DrafterBatch, config: TrainConfig, seed: int
) -> Bool[torch.Tensor, "batch seq"]:
    """Return at most `on_policy_share` of `max_positions` positions where a step of decoding starts."""
    walk = sample(batch.positions, config.num_on_policy, seed)
    for _ in range(WALK_STEPS):
        at_walk = replace(batch, positions=walk)
        walk = next_starts(at_walk, counter.count(at_walk)) & batch.positions
    return walk


def next_starts(batch: DrafterBatch, num_accepted: Int[torch.Tensor, " position"]) -> Bool[torch.Tensor, "batch seq"]:
    """Return where the next steps start, after steps at `batch.positions`.

    `num_accepted` counts each step's accepted draft tokens. A step that reaches the end of its text
    has no next one. Several steps may have the same next one.
    """
    seq = batch.input_ids.shape[1]
    row, column = batch.positions.nonzero(as_tuple=True)
    continuations = batch.continuations[row, column]  # [position, horizon]: the target's choice, then the draft's labels
    ahead = column[:, None] + 1 + torch.arange(continuations.shape[1], device=row.device)
    text = batch.input_ids[row[:, None], ahead.clamp(max=seq - 1)]
    on_text = ((text == continuations) & (continuations != UNKNOWN) & (ahead < seq)).cumprod(1).sum(1)
    following = column + 1 + torch.minimum(num_accepted, on_text)
    inside = following < seq
    if batch.starts is not None:  # packed rows: the next column may belong to another text
        inside &= batch.starts[row, following.clamp(max=seq - 1)] == batch.starts[row, column]
    starts = torch.zeros_like(batch.positions)
    starts[row[inside], following[inside]] = True
    return starts


def fill_up(batch: DrafterBatch, starts: Bool[torch.Tensor, "batch seq"], config: TrainConfig, seed: int) -> DrafterBatch:
    """Add random labelled positions to `starts`, up to `max_positions`."""
    assert config.max_positions is not None, "TrainConfig requires it"
    others = sample(batch.positions & ~starts, config.max_positions - int(starts.sum()), seed + 1)
    return replace(batch, positions=starts | others).indexed()


def sample(positions: Bool[torch.Tensor, "batch seq"], count: int, seed: int) -> Bool[torch.Tensor, "batch seq"]:
    """Return `count` of the marked positions at random, or all if there are fewer."""
    marked = positions.flatten().nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed % 2**63)
    kept = torch.randperm(len(marked), generator=generator)[:count].to(marked.device)
    chosen = torch.zeros_like(positions).flatten()
    chosen[marked[kept]] = True
    return chosen.view_as(positions)
