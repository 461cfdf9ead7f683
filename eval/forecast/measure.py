"""What the forecast measures on the prompts of the evaluation: text, tokens per step, and seconds of a step."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from statistics import mean, median
from typing import Any

import torch
from jaxtyping import Int

from ...data.suites import PromptSet
from ...models.decoding.loop import generate
from ...models.decoding.protocols import AcceptanceRule, Drafter
from ...models.decoding.sampling import RowSeeds
from ...models.decoding.tree import chain_tree, empty_tree
from ...models.decoding.types import Prompts
from ...models.drafters import NullDrafter
from ...models.llm.hf_target import HFTarget
from ...models.machine import synchronize
from ..measure.plan import first_turn_ids
from ..measure.timing import time_generation
from ..measure.trace import Watched

logger = logging.getLogger(__name__)

PACED_SHARE = 0.5
"""Seconds of an answer with a paced drafter over those of plain decoding, about."""
WARM_UP_STEPS, TIMED_STEPS, UNEVEN_STEPS, TURNS = 2, 8, 48, 3
"""Steps of a turn that aren't timed, those that are, those of drafters whose steps differ, and turns of each drafter."""


CONTEXTS, WIDTHS = (64, 256, 1024, 4096), (1, 8, 32)
"""Tokens of a text, and of a pass after it, of which passes are timed."""
LONGER = 4
"""Times that all texts so far took, which the next one may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastPrompt:
    """A prompt of a suite, its first turn only."""

    suite: str
    category: str
    input_ids: Int[torch.Tensor, " seq"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A prompt's answer: its tokens without the prefill's, and the verify steps that made them."""

    tokens: int
    steps: int
    seconds: float = 0.0
    """Seconds of the steps of the batch that it was in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certainty:
    """How certain the target is at each token of one answer, in nats and as probabilities."""

    entropies: list[float]
    likeliest: list[float]
    """Probability of the likeliest token."""


def draw_prompts(suites: Sequence[PromptSet], target: HFTarget, room: int, count: int, *, seed: int) -> list[ForecastPrompt]:
    """Draw prompts with at most `room` tokens, in turns from all suites."""
    by_suite = []
    for suite in suites:
        prompts = []
        for prompt in Random(seed).sample(suite.prompts, len(suite.prompts)):
            ids = first_turn_ids(prompt, target.tokenizer)[0]
            if len(ids) <= room:
                prompts.append(ForecastPrompt(suite=suite.name, category=prompt.category, input_ids=ids.to(target.device)))
            if len(prompts) == count:
                break
        by_suite.append(prompts)
    longest = max(map(len, by_suite))
    return [prompts[place] for place in range(longest) for prompts in by_suite if place < len(prompts)][:count]


def decode(
    target: HFTarget,
    drafter: Drafter[Any, Any],
    rule: AcceptanceRule,
    prompts: Sequence[ForecastPrompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    done: Callable[[int], object] = lambda count: None,
) -> list[Steps]:
    """Answer the prompts in batches. Returns the tokens, steps and seconds of each; `done` is told of each batch."""
    answered = list[Steps]()
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": target.stop_ids}
    for start in range(0, len(prompts), batch_size):
        ids = [prompt.input_ids for prompt in prompts[start : start + batch_size]]
        generation = time_generation(target, drafter, rule, ids, seeds=range(start, start + len(ids)), **options)
        for answer in map(generation.answer, range(len(ids))):
            tokens, steps = len(answer.token_ids) - 1, sum(answer.accepted_histogram)
            answered.append(Steps(tokens=tokens, steps=steps, seconds=generation.decode_seconds))
        done(len(ids))
    return answered


def in_turns(
    target: HFTarget,
    drafter: Drafter[Any, Any],
    rule: AcceptanceRule,
    prompts: Sequence[ForecastPrompt],
    *,
    is_timed: bool = True,
    **options: Any,
) -> tuple[list[Steps], list[Steps]]:
    """Answer one prompt after another, each by plain decoding first if `is_timed`. Returns plain answers, and the drafter's.

    What a paced drafter drafts depends on the number of rows, and on the seconds that it has seen.
    """
    plain, drafted, done = list[Steps](), list[Steps](), options.pop("done", lambda count: None)
    options |= {"batch_size": 1}
    for prompt in prompts:
        plain += decode(target, NullDrafter(), rule, [prompt], **options) if is_timed else []
        drafted += decode(target, drafter, rule, [prompt], **options, done=done)
    return plain, drafted


def plain_answers(
    target: HFTarget, rule: AcceptanceRule, prompts: Sequence[ForecastPrompt], *, max_new_tokens: int, batch_size: int
) -> list[Certainty]:
    """Answer the prompts by plain decoding. Returns how certain the target was at each token."""
    watched, certainties = Watched(rule), list[Certainty]()
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": target.stop_ids}
    for start in range(0, len(prompts), batch_size):
        ids = [prompt.input_ids for prompt in prompts[start : start + batch_size]]
        rows = [Certainty(entropies=[], likeliest=[]) for _ in ids]
        seeds = RowSeeds(range(start, start + len(ids)))
        for step in generate(target, NullDrafter(), watched, ids, generator=seeds, **options):
            log_probs = watched.output.logits[: len(step.rows), 0].float().log_softmax(-1)
            entropies = -(log_probs.exp() * log_probs).nansum(-1)  # a token that is ruled out adds nothing
            for row, entropy, likeliest in zip(step.rows, entropies.tolist(), log_probs.amax(-1).exp().tolist(), strict=True):
                rows[row].entropies.append(entropy)
                rows[row].likeliest.append(likeliest)
        certainties += rows
    return certainties


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of a step of a full batch, in each turn of the measurement."""

    steps: list[float]
    draft: float
    """Of them those of the drafter; median over the turns."""
    prefill: float
    """Seconds of the prefill of the batch; median over the turns."""


def step_seconds(
    target: HFTarget,
    drafters: Mapping[str, Drafter[Any, Any]],
    rule: AcceptanceRule,
    prompts: Sequence[ForecastPrompt],
    *,
    batch_size: int,
    max_new_tokens: int,
    uneven: Collection[str] = (),
) -> dict[str, StepSeconds]:
    """Time some steps of each drafter in turns, so that a slow minute of the machine slows all of them.

    The batch has `batch_size` rows; prompts are repeated if there are fewer. Steps of `uneven` drafters differ with the
    text, which lookups find nothing in at first: they take more steps, and the mean counts.
    """
    batch = [prompt.input_ids for prompt in islice(cycle(prompts), batch_size)]
    turns: dict[str, list[tuple[float, float, float]]] = {name: [] for name in drafters}
    for _ in range(TURNS):
        for name, drafter in drafters.items():
            turns[name].append(_time_turn(target, drafter, rule, batch, max_new_tokens, is_uneven=name in uneven))
    seconds = {}
    for name, timed in turns.items():
        steps, drafts, prefills = zip(*timed, strict=True)
        seconds[name] = StepSeconds(steps=list(steps), draft=median(drafts), prefill=median(prefills))
    return seconds


def pass_seconds(target: HFTarget, *, seconds: float) -> dict[int, dict[int, float]]:
    """Return the time of passes over WIDTHS tokens after texts of CONTEXTS tokens: medians, by text and width.

    Texts that are longer than the context window, or that would take longer than the time, are left out; a target in
    other processes has none.
    """
    passes, ends = dict[int, dict[int, float]](), time.monotonic() + seconds
    for length in CONTEXTS if target.has_layers else ():
        began = time.monotonic()
        if length + max(WIDTHS) > target.context_length or began + (began - ends + seconds) * LONGER > ends:
            break
        text = target.probe_ids.repeat(length)[None, :length]
        target.prefill(Prompts.of(text), max_new_tokens=1, max_nodes=max(WIDTHS))
        timed: dict[int, list[float]] = {width: [] for width in WIDTHS}
        for _ in range(1 + TURNS):
            for width, times in timed.items():
                tree = chain_tree(text[:, : width - 1]) if width > 1 else empty_tree(1, target.device)
                synchronize(target.device)
                start = time.perf_counter()
                target.verify(text[:, -1], tree)
                synchronize(target.device)
                times.append(time.perf_counter() - start)
        passes[length] = {width: median(times[1:]) for width, times in timed.items()}  # the first one warms up
    target.release_cache()
    return passes


def _time_turn(
    target: HFTarget,
    drafter: Drafter[Any, Any],
    rule: AcceptanceRule,
    batch: Sequence[Int[torch.Tensor, " _"]],
    max_new_tokens: int,
    *,
    is_uneven: bool,
) -> tuple[float, float, float]:
    """Return the seconds of a step, of its draft and of the prefill, in one turn."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": (), "timed": True}
    stream = generate(target, drafter, rule, batch, generator=RowSeeds(range(len(batch))), **options)
    wall, drafted = list[float](), list[float]()
    last = time.perf_counter()
    for step in islice(stream, 1 + WARM_UP_STEPS + (UNEVEN_STEPS if is_uneven else TIMED_STEPS)):
        synchronize(target.device)
        now = time.perf_counter()
        if len(step.rows) < len(batch):
            break
        wall.append(now - last)
        drafted.append(0.0 if step.seconds is None else step.seconds.draft)
        last = now
    first = min(1 + WARM_UP_STEPS, len(wall) - 1)  # answers of few tokens have few steps
    average = mean if is_uneven else median
    return average(wall[first:]), average(drafted[first:]), wall[0]


def is_too_long(
    steps: Mapping[tuple[str, float], Sequence[Any]],
    paced: Collection[str],
    is_trained: Mapping[str, bool],
    seconds: float,
    ends: float,
) -> bool:
    """Return whether paced drafters can't answer one prompt after another in the time that is left, and log it.

    `seconds` is what plain decoding takes for a round. They stay if nothing else is trained.
    """
    num_parts = {label: len(counts) for (label, _), counts in steps.items() if label in paced}
    count = sum(1 + PACED_SHARE * number for number in num_parts.values())
    others = [label for label, trained in is_trained.items() if trained and label not in paced]
    if not paced or not others or seconds * count < ends - time.monotonic():
        return False
    names = ", ".join(sorted(paced))
    logger.warning("%s: not forecast, since answers of one prompt after another take too long; raise --minutes", names)
    return True
