"""Successive halving: many settings decode a few prompts, and the faster ones decode more.

A round deals its settings into heats of nearly equal size. All heats decode the same prompts. The
settings of a heat and plain decoding take turns, so a slow minute of the machine slows all of them.
The faster half of a round, by the speedup over plain decoding, is in the next round, which has twice
as many prompts. At most FINALISTS settings are in the last round, with all prompts; it follows as
soon as a round had all prompts.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from jaxtyping import Int
from tqdm import tqdm

from ...models.decoding.protocols import AcceptanceRule, Drafter
from ...models.drafters import NullDrafter, load_drafter
from ...models.drafters.saved.loading import trained_parts
from ...models.drafters.saved.parts import DrafterParts
from ...models.llm.hf_target import HFTarget
from ...models.llm.linears import choose_linears
from ..measure.environment import within_memory
from ..measure.methods import proposer
from ..measure.timing import Generation, attempts_without_graphs, time_generation

logger = logging.getLogger(__name__)

Setting = dict[str, Any] | None
"""Run-time options of a drafter; None is plain decoding."""
TuningPrompts = Sequence[Int[torch.Tensor, " _"]]

FIRST_BATCHES = 2
"""Batches that each setting decodes in the first round."""
FINALISTS = 5
"""Most settings of the last round and of a heat. So many drafters are in memory together."""
FINAL_REPEATS = 3
"""Times that each batch of the last round is decoded; the median time counts."""
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured speed of a setting in batches of one size, prefills included."""

    setting: Setting
    batch_size: int
    num_batches: int
    tokens_per_step: float
    tokens_per_second: float
    speedup: float
    """Ratio to plain decoding of the same prompts in the same minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A setting that ran out of memory in batches of a size; None is plain decoding."""

    setting: Setting
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What all settings of a drafter decode, in batches of one size."""

    parts: DrafterParts
    target: HFTarget
    rule: AcceptanceRule
    batches: Sequence[TuningPrompts]
    """Full batches of the same size."""
    max_new_tokens: int
    left_out: list[LeftOut] = field(default_factory=list)
    """Settings that ran out of memory so far."""

    @property
    def batch_size(self) -> int:
        return len(self.batches[0])

    def drafter(self, setting: Setting) -> Drafter[Any, Any]:
        """Load the drafter in this setting, as the evaluation runs it."""
        if setting is None:
            return NullDrafter()
        drafter = load_drafter(self.parts, self.target, **setting)
        if self.target.fast_linears:
            choose_linears(*trained_parts(drafter))
        return proposer(drafter, self.target)

    def decode(self, drafter: Drafter[Any, Any], index: int, max_new_tokens: int) -> Generation:
        """Decode one batch; its answers have the same seeds for every drafter."""
        seeds = range(index * self.batch_size, (index + 1) * self.batch_size)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": self.target.stop_ids, "seeds": seeds}
        return time_generation(self.target, drafter, self.rule, self.batches[index], **options)


@torch.inference_mode()
def halve(trial: Trial, settings: Sequence[Setting]) -> list[Speed]:
    """Find the fastest settings; return the speeds of the last round, plain decoding first.

    Settings that run out of memory are left out. The result is empty if plain decoding does.
    """
    remaining, num_batches = list(settings), FIRST_BATCHES
    while len(remaining) > FINALISTS:
        # 1. Deal the settings evenly, so that no heat has more than one setting less than another.
        num_heats = math.ceil(len(remaining) / FINALISTS)
        heats = [remaining[index::num_heats] for index in range(num_heats)]
        speeds = [speed for heat in heats for speed in measure(trial, heat, min(num_batches, len(trial.batches)))]
        # 2. Keep the faster half; after all batches, another round would measure nothing new.
        drafting = sorted((speed for speed in speeds if speed.setting is not None), key=lambda speed: -speed.speedup)
        half = (len(remaining) + 1) // 2
        num_kept = half if num_batches < len(trial.batches) else min(half, FINALISTS)
        remaining, num_batches = [speed.setting for speed in drafting[:num_kept]], 2 * num_batches
    return measure(trial, remaining, len(trial.batches), repeats=FINAL_REPEATS)


def measure(trial: Trial, settings: Sequence[Setting], num_batches: int, *, repeats: int = 1) -> list[Speed]:
    """Measure plain decoding and some settings, in turns, on the first batches.

    If one runs out of memory, all caches are released, and the others are measured again from the
    start. Without plain decoding there is no speed.
    """
    fitting = [] if any(entry.setting is None for entry in trial.left_out) else [None, *settings]
    while None in fitting:
        measured = _measure_together(trial, fitting, num_batches, repeats)
        if not isinstance(measured, int):
            return measured
        entry = LeftOut(setting=fitting.pop(measured), batch_size=trial.batch_size)
        logger.warning(
            "%s ran out of memory in batches of %d and is left out", entry.setting or "plain decoding", entry.batch_size
        )
        trial.left_out.append(entry)
    return []


def _measure_together(trial: Trial, settings: Sequence[Setting], num_batches: int, repeats: int) -> list[Speed] | int:
    """Measure all settings, or return the index of one that ran out of memory."""
    # 1. Load each drafter, and warm it up.
    drafters: list[Drafter[Any, Any]] = []
    for index, setting in enumerate(settings):
        drafter = within_memory(partial(trial.drafter, setting), trial.target)
        if drafter is None or within_memory(partial(trial.decode, drafter, 0, WARM_UP_TOKENS), trial.target) is None:
            return index
        drafters.append(drafter)

    # 2. Decode each batch with each setting; another setting comes first in each turn.
    seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
    runs: dict[tuple[int, int], Generation] = {}
    name = f"batches of {trial.batch_size}, {len(settings) - 1} settings"
    for turn in tqdm(range(repeats * num_batches), desc=name, unit="turn"):
        batch = turn % num_batches
        for step in range(len(drafters)):
            index = (turn + turn // num_batches + step) % len(drafters)
            decode = partial(trial.decode, drafters[index], batch, trial.max_new_tokens)
            if (attempts := within_memory(partial(attempts_without_graphs, decode), trial.target)) is None:
                return index
            runs[index, batch] = attempts[-1]
            seconds[index, batch].append(attempts[-1].seconds)
    trial.target.release_cache()

    # 3. The speeds.
    totals = [sum(median(seconds[index, batch]) for batch in range(num_batches)) for index in range(len(settings))]
    by_setting = [[runs[index, batch] for batch in range(num_batches)] for index in range(len(settings))]
    speeds = [sum(run.num_tokens for run in decoded) / total for decoded, total in zip(by_setting, totals, strict=True)]
    return [
        Speed(
            setting=setting,
            batch_size=trial.batch_size,
            num_batches=num_batches,
            tokens_per_step=_tokens_per_step(decoded),
            tokens_per_second=speed,
            speedup=speed / speeds[0],  # plain decoding is the first
        )
        for setting, decoded, speed in zip(settings, by_setting, speeds, strict=True)
    ]


def _tokens_per_step(runs: Sequence[Generation]) -> float:
    """Compute the tokens per verify step; 1 if all answers end with their prefill."""
    steps = [tokens for run in runs for step in run.steps if not step.is_prefill for tokens in step.tokens]
    return sum(map(len, steps)) / len(steps) if steps else 1.0
