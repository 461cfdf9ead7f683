"""One run of the decode loop, with its wall time."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int

from ...models.decoding.loop import generate
from ...models.decoding.protocols import AcceptanceRule, Drafter, Target
from ...models.decoding.sampling import RowSeeds
from ...models.decoding.tree import tree_tokens
from ...models.decoding.types import Step
from ...models.machine import synchronize
from ...models.phases import PhaseSeconds
from ..records.records import TreeTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Steps of one run of the decode loop, with its seconds of prefill and of decoding.

    The seconds are the batch's: all its rows were answered in them.
    """

    steps: list[Step]
    prefill_seconds: float
    decode_seconds: float

    def answer(self, row: int) -> "TimedAnswer":
        """Return what the run did for one row of its batch."""
        own = [(step, step.rows.index(row)) for step in self.steps if row in step.rows]
        accepted = [step.num_accepted[place] for step, place in own if not step.is_prefill]
        return TimedAnswer(
            token_ids=[token for step, place in own for token in step.tokens[place]],
            accepted_histogram=[accepted.count(length) for length in range(max(accepted, default=-1) + 1)],
            num_draft_tokens=sum(step.num_nodes for step, _ in own),
            drawn=any(step.drawn for step, _ in own),
            tree_tokens=_tree_tokens(own),
        )

    @property
    def phase_seconds(self) -> PhaseSeconds:
        """Summed over the verify steps; these must have been timed."""
        phases = [step.seconds for step in self.steps if step.seconds is not None]
        assert len(phases) == sum(not step.is_prefill for step in self.steps)
        return PhaseSeconds(
            draft=sum(phase.draft for phase in phases),
            verify=sum(phase.verify for phase in phases),
            accept=sum(phase.accept for phase in phases),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """A row's tokens, and the steps that it took part in.

    `accepted_histogram[k]` counts the verify steps that accepted k draft tokens.
    """

    token_ids: list[int]
    accepted_histogram: list[int]
    num_draft_tokens: int
    """That the target read for this row, padding included."""
    drawn: bool
    tree_tokens: TreeTokens
    """Of each verify step, where phases were timed."""


def _tree_tokens(own: Sequence[tuple[Step, int]]) -> TreeTokens:
    """Return what merging shared prefixes saved a row, and what padding cost it.

    Each pair has a step and the row's index in it.
    """
    counts = [(tree_tokens(*step.links), place, step.num_nodes) for step, place in own if step.links is not None]
    return TreeTokens(
        shared=[int(shared[place]) for (shared, _), place, _ in counts],
        separate=[int(separate[place]) for (_, separate), place, _ in counts],
        read=[num_read for _, _, num_read in counts],
    )


def time_generation(
    target: Target,
    drafter: Drafter[Any, Any],
    rule: AcceptanceRule,
    prompts: Sequence[Int[torch.Tensor, " _"]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    seeds: Sequence[int],
    timed: bool = False,
) -> Generation:
    """Decode a batch of prompts and take its wall time.

    What a rule leaves to chance is decided by `seeds`, one for each row. `timed` takes the phases
    too, which slows an accelerator down.
    """
    device = prompts[0].device
    synchronize(device)
    start = time.perf_counter()
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, "timed": timed}
    stream = generate(target, drafter, rule, prompts, generator=RowSeeds(seeds), **options)
    first_step = next(stream)  # its tokens have been read by the host, so an accelerator has finished
    first_token = time.perf_counter()
    steps = [first_step, *stream]
    synchronize(device)
    end = time.perf_counter()
    return Generation(steps=steps, prefill_seconds=first_token - start, decode_seconds=end - first_token)
