"""Decodes imaginary texts in virtual time, by plain, synchronous and pipelined decoding."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from pipeline_clock import AnyClock, Clock, Costs, Pipeline
from pipeline_conditions import Condition
from pipeline_language import Language
from virtual_pipeline import VirtualDrafter, VirtualStreamingDrafter, VirtualTarget

from outrider.models.decoding.acceptance import GreedyAcceptance
from outrider.models.decoding.loop import generate
from outrider.models.decoding.pipelined import generate_pipelined
from outrider.models.decoding.speculation import Speculation
from outrider.models.decoding.types import Step

VIRTUAL = "virtual time"
PROMPT_LENGTH = 16
METER_ROUNDS, METER_CALLS = 5, 2000
"""Measured calls of an empty method that show what measuring takes. The fastest round counts."""
MakeSpeculation = Callable[[AnyClock], Speculation]
"""Makes a policy that reads this clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """An answer, and when its tokens were emitted."""

    tokens: list[int]
    times: list[float]
    """When each token after the first one was emitted, since the first one."""
    start: float
    """When the first one was emitted, at the end of the prefill."""
    head_seconds: float
    """Processor seconds of the loop, the rule and the window, measured: without target and drafter."""

    @property
    def seconds(self) -> float:
        return self.times[-1]

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens; 0 between tokens of one step."""
        return [later - earlier for earlier, later in zip([0.0, *self.times], self.times, strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Decoding of one text in virtual time."""

    decoded: Decoded
    drafts: list[tuple[float, float]]
    """Begin and end of each draft pass."""
    pipeline: Pipeline
    num_entries: int


@dataclass(slots=True)
class Meter:
    """Processor seconds spent in the target and in the drafter, and the number of their calls."""

    seconds: float = 0.0
    num_calls: int = 0

    @property
    def whole_seconds(self) -> float:
        """Seconds with what the meter itself takes."""
        return self.seconds + self.num_calls * seconds_of_metering()


@dataclass(slots=True)
class Metered:
    """Proxy that measures all calls of methods."""

    inner: Any
    meter: Meter = field(default_factory=Meter)

    def __getattr__(self, name: str) -> Any:
        value, meter = getattr(self.inner, name), self.meter
        if not callable(value):
            return value

        def measured(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return value(*args, **options)
            finally:
                meter.num_calls += 1
                meter.seconds += time.thread_time() - start

        return measured


@cache
def seconds_of_metering() -> float:
    """Measure the processor seconds that a measured call takes beside the measured ones."""
    samples = []
    for _ in range(METER_ROUNDS):
        meter = Meter()
        empty = Metered(SimpleNamespace(call=lambda: None), meter)
        start = time.thread_time()
        for _ in range(METER_CALLS):
            empty.call()
        samples.append((time.thread_time() - start - meter.seconds) / METER_CALLS)
    return min(samples)


def play(
    condition: Condition,
    seed: int,
    *,
    num_drafts: int | None = None,
    speculation: MakeSpeculation | None = None,
    language: Language | None = None,
    prompt: Sequence[int] = range(PROMPT_LENGTH),
) -> Outcome:
    """Decode a text: synchronously with chains of `num_drafts` tokens, or with a `speculation`.

    `seed` chooses an imaginary text, unless there is a `language`.
    """
    clock, costs, meter = Clock(), condition.costs, Meter()
    language = language or Language(seed, condition.acceptance, spread=condition.spread, claimed=condition.claimed)
    pipeline = Pipeline(costs, clock, cancels=condition.cancels, is_backward=condition.is_backward)
    target = VirtualTarget(pipeline, language, sends_twice=condition.sends_twice)
    drafter = make_drafter(clock, costs, language, num_drafts)
    policy = speculation(clock) if speculation else None
    text = decode(Metered(target, meter), Metered(drafter, meter), prompt, condition.new_tokens, clock, policy, meter)
    return Outcome(decoded=text, drafts=clock.drafts, pipeline=pipeline, num_entries=target.num_entries)


def make_drafter(clock: AnyClock, costs: Costs, language: Language, num_drafts: int | None) -> Any:
    """Return a synchronous drafter of chains, or a streaming one if `num_drafts` is None."""
    if num_drafts is None:
        return VirtualStreamingDrafter(clock, costs, language)
    return VirtualDrafter(clock, costs, language, num_drafts)


def decode(
    target: Any,
    drafter: Any,
    prompt: Sequence[int],
    new_tokens: int,
    clock: AnyClock,
    speculation: Speculation | None,
    meter: Meter | None = None,
) -> Decoded:
    """Decode a text, synchronously if there is no `speculation`. Times count from the end of the prefill."""
    prompts, rule, meter = torch.tensor([[*prompt]]), GreedyAcceptance(), meter or Meter()
    steps: Iterator[Step]
    if speculation is None:
        steps = generate(target, drafter, rule, prompts, max_new_tokens=new_tokens)
    else:
        steps = generate_pipelined(target, drafter, rule, prompts, max_new_tokens=new_tokens, speculation=speculation)
    tokens, times = [*next(steps).tokens[0]], []
    start, meter.seconds, meter.num_calls = clock.now, 0.0, 0
    start_seconds = time.thread_time()
    for step in steps:
        tokens += step.tokens[0]
        times += [clock.now - start] * len(step.tokens[0])
    head_seconds = max(time.thread_time() - start_seconds - meter.whole_seconds, 0.0)
    return Decoded(tokens=tokens, times=times, start=start, head_seconds=head_seconds)


def outcomes(condition: Condition, **method: Any) -> list[Outcome]:
    """Decode all texts of a condition."""
    return [play(condition, seed, **method) for seed in range(condition.num_texts)]


def row(texts: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of a method in virtual time."""
    num_tokens = sum(len(text.decoded.times) for text in texts)
    num_runs = sum(len(text.pipeline.sizes) for text in texts)
    return {
        **speed_figures([text.decoded for text in texts], VIRTUAL),
        "runs_per_token": num_runs / num_tokens,
        "entries_per_token": sum(text.num_entries for text in texts) / num_tokens,
        "hop_bytes_per_token": sum(text.pipeline.bytes_sent for text in texts) / num_tokens,
        "cancelled_runs": sum(len(text.pipeline.cancelled) for text in texts) / num_runs,
        "head_cpu_seconds_per_run": sum(text.decoded.head_seconds for text in texts) / num_runs,
        **stage_figures(texts),
    }


def speed_figures(texts: Sequence[Decoded], clock: str) -> dict[str, Any]:
    """Return the figures that every clock has."""
    num_tokens = sum(len(text.times) for text in texts)
    gaps = sorted(gap for text in texts for gap in text.gaps)
    return {
        "clock": clock,
        "tokens": num_tokens,
        "text_seconds": [text.seconds for text in texts],
        "tokens_per_second": num_tokens / sum(text.seconds for text in texts),
        "first_seconds": median(text.times[0] for text in texts),
        "gap_median_seconds": gaps[len(gaps) // 2],
        "gap_p95_seconds": gaps[int(0.95 * (len(gaps) - 1))],
    }


def stage_figures(texts: Sequence[Outcome]) -> dict[str, Any]:
    """Return how busy the stages were, and how much of the cancelled work was saved.

    `wasted` is the stages' time for runs that were cancelled, over all their time. `saved` is the
    share of cancelled work that wasn't done.
    """
    busy, wasted, cancelled, seconds = 0.0, 0.0, 0.0, 0.0
    for text in texts:
        pipeline, dead = text.pipeline, text.pipeline.cancelled
        seconds += text.decoded.seconds * pipeline.costs.num_stages
        busy += sum(span.end - span.start for span in pipeline.spans)
        wasted += sum(span.end - span.start for span in pipeline.spans if span.number in dead)
        cancelled += sum(pipeline.full_seconds(number) for number in dead)
    return {
        "utilisation": busy / seconds,
        "wasted_share": wasted / busy if busy else 0.0,
        "saved_share": 1 - wasted / cancelled if cancelled else None,
    }
