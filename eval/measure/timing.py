"""One run of the decode loop, with its wall time and its processor time."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int

from ...models.decoding.loop import generate
from ...models.decoding.protocols import AcceptanceRule, Drafter, Target
from ...models.decoding.sampling import RowSeeds
from ...models.decoding.types import Step
from ...models.llm.cuda_graphs import num_graphs
from ...models.llm.weight_stream import WeightStream
from ...models.machine import synchronize
from ...models.phases import PhaseSeconds, RunCounts, StreamCounts

Loop = Callable[..., Iterator[Step]]
"""A decode loop, with the parameters of `generate`."""
MAX_ATTEMPTS = 4
"""Times that an answer is decoded, at most, until no graph is made meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Steps of one run of the decode loop, with the seconds of its prefill and of its decoding.

    The seconds are those of the whole batch: all rows were answered within them.
    """

    steps: list[Step]
    prefill_seconds: float
    decode_seconds: float
    processor_seconds: float
    """Processor seconds of all threads of the process, over prefill and decoding."""
    num_graphs: int
    """Graphs that were recorded or compiled meanwhile: their time isn't that of decoding."""
    streaming: StreamCounts | None = None
    """Counts of the weights that were read; None for a target that is in memory."""
    runs: RunCounts | None = None
    """Counts of the target's passes; None for a target without stages."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole decoding, prefill included."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(tokens) for step in self.steps for tokens in step.tokens)

    @property
    def token_ids(self) -> list[list[int]]:
        """Tokens of each row's answer."""
        return answers_of(self.steps)

    def answer(self, row: int) -> "TimedAnswer":
        """Extract one row's answer from the batch."""
        row_steps = [(step, step.rows.index(row)) for step in self.steps if row in step.rows]
        accepted = [step.num_accepted[index] for step, index in row_steps if not step.is_prefill]
        return TimedAnswer(
            token_ids=[token for step, index in row_steps for token in step.tokens[index]],
            accepted_histogram=[accepted.count(length) for length in range(max(accepted, default=-1) + 1)],
            num_draft_tokens=sum(step.num_nodes for step, _ in row_steps),
            accepted_origins=Counter(
                origin for step, index in row_steps if step.origins is not None for origin in step.origins[index]
            ),
        )

    @property
    def phase_seconds(self) -> PhaseSeconds:
        """Seconds of each phase, summed over the verify steps. The steps must have been timed."""
        phases = [step.seconds for step in self.steps if step.seconds is not None]
        assert len(phases) == sum(not step.is_prefill for step in self.steps)
        return PhaseSeconds(
            draft=sum(phase.draft for phase in phases),
            verify=sum(phase.verify for phase in phases),
            accept=sum(phase.accept for phase in phases),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """One row's tokens, and counts over the steps it took part in."""

    token_ids: list[int]
    accepted_histogram: list[int]
    num_draft_tokens: int
    """Draft tokens that the target read for this row, padding included."""
    accepted_origins: Mapping[int, int]
    """Accepted draft tokens by their sources (`DraftTree.origins`); empty for trees of one source."""

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens, including those cut off at the answer's end."""
        return sum(length * count for length, count in enumerate(self.accepted_histogram))


def answers_of(steps: Iterable[Step]) -> list[list[int]]:
    """Collect the tokens of each row's answer. The first step must be the prefill of all rows."""
    answers: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            answers[row] += tokens
    return list(answers.values())


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
    loop: Loop = generate,
) -> Generation:
    """Decode a batch of prompts and measure its wall time and its processor time.

    `seeds` has one seed for each row; random decisions of the rule depend on it. `timed` also times
    the phases, which slows an accelerator down. `loop` decodes.
    """
    # 1. Start the clocks when the device has finished earlier work.
    device = prompts[0].device
    source: WeightStream | None = getattr(target, "stream", None)
    before = None if source is None else source.stats
    counts_before: RunCounts | None = getattr(target, "run_counts", None)
    graphs_before = num_graphs()
    synchronize(device)
    processor_start, start = time.process_time(), time.perf_counter()
    # 2. Prefill.
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, "timed": timed}
    stream = loop(target, drafter, rule, prompts, generator=RowSeeds(seeds), **options)
    first_step = next(stream)  # the host has read its tokens, so an accelerator has finished
    first_token = time.perf_counter()
    # 3. Decode.
    steps = [first_step, *stream]
    synchronize(device)
    end, processor_end = time.perf_counter(), time.process_time()
    counts: RunCounts | None = getattr(target, "run_counts", None)
    return Generation(
        steps=steps,
        prefill_seconds=first_token - start,
        decode_seconds=end - first_token,
        processor_seconds=processor_end - processor_start,
        num_graphs=num_graphs() - graphs_before,
        streaming=None if source is None or before is None else source.stats - before,
        runs=None if counts is None or counts_before is None else counts - counts_before,
    )


def attempts_without_graphs(decode: Callable[[], Generation]) -> list[Generation]:
    """Decode until no graph is recorded or compiled meanwhile; return all attempts.

    There are MAX_ATTEMPTS at most. The time of an attempt that made a graph isn't that of decoding.
    """
    attempts = [decode()]
    while attempts[-1].num_graphs and len(attempts) < MAX_ATTEMPTS:
        attempts.append(decode())
    return attempts
