"""Prediction of a drafter's fastest setting from parts that are measured separately.

The target's step is measured by batch and tree size (`StepTimes`). Drafter, rule and loop run for
real, over stored answers of the target (`ReplayTarget`). The tokens of a replay over the seconds of
both parts predict the decoding speed. So each further setting costs only its drafting.

The few fastest settings then decode for real, in turns. Only this shows how drafter and target slow
each other down, for example by sharing a cache.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from ...models.decoding.loop import generate, kept_places
from ...models.decoding.protocols import AcceptanceRule, Drafter, Target
from ...models.decoding.sampling import RowSeeds
from ...models.decoding.types import Step
from ...models.drafters import NullDrafter, load_drafter
from ...models.drafters.saved.parts import DrafterParts
from ...models.drafters.saved.tuned import Choice
from ...models.llm.hf_target import HFTarget
from ...models.machine import synchronize
from ..measure.memory import within_memory
from ..measure.methods import proposer
from .replay import Answered, ReplayTarget
from .step_times import StepTimes

Setting = dict[str, Any] | None
"""Run-time options of a drafter; None is plain decoding."""

NUM_FINALISTS = 4
MARGIN = 0.2
"""Largest share of the best predicted speed that a setting may lack and still decode for real."""
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured speed of a setting in batches of one size.

    Its fields are those of `Choice`.
    """

    setting: Setting
    batch_size: int
    tokens_per_step: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Speed):
    """Predicted speed of a setting."""

    own_seconds: float
    """Seconds of drafter, rule and loop per step: all but the target's."""
    num_nodes: float
    """Mean number of nodes per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One verify step of a batch.

    Seconds are 0 unless phases were timed.
    """

    rows: int
    """Rows that the target reads, copies included (`kept_places`)."""
    nodes: int
    own_seconds: float
    """Seconds of drafter and rule."""
    verify_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Cost of decoding some prompts.

    Tokens of the prefills are not counted. Each row counts its steps.
    """

    num_tokens: int
    num_steps: int
    passes: tuple[Pass, ...]
    seconds: float

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps

    @property
    def num_nodes(self) -> float:
        """Mean number of nodes per pass."""
        return sum(step.nodes for step in self.passes) / len(self.passes)

    @property
    def own_seconds(self) -> float:
        """Seconds of everything but the target.

        The median counts for passes with equally many rows, since a short disturbance is not a
        property of the setting.
        """
        by_rows: dict[int, list[float]] = {}
        for step in self.passes:
            by_rows.setdefault(step.rows, []).append(step.own_seconds)
        loop = self.seconds - sum(step.own_seconds + step.verify_seconds for step in self.passes)
        return loop + sum(len(seconds) * median(seconds) for seconds in by_rows.values())


def run(
    target: Target,
    drafter: Drafter[Any, Any],
    rule: AcceptanceRule,
    answered: Sequence[Answered],
    *,
    timed: bool,
) -> Decoding:
    """Decode one batch, and time it from its first token on.

    The answers of a replay end where the stored ones ended.
    """
    # 1. Prefill: the first step, which is not timed.
    options: dict[str, Any] = {
        "max_new_tokens": [len(item.answer) for item in answered],
        "generator": RowSeeds([item.seed for item in answered]),
        "timed": timed,
    }
    stream = generate(target, drafter, rule, [item.prompt for item in answered], **options)
    next(stream)
    device = answered[0].prompt.device

    # 2. Decode and time all verify steps.
    started = time.perf_counter()
    steps = list(stream)
    synchronize(device)
    num_rows = rows_read(steps, len(answered), few_sizes=target.has_fixed_shapes)
    return Decoding(
        seconds=time.perf_counter() - started,
        num_tokens=sum(len(tokens) for step in steps for tokens in step.tokens),
        num_steps=sum(len(step.rows) for step in steps),
        passes=tuple(
            Pass(
                rows=rows,
                nodes=step.num_nodes,
                own_seconds=0.0 if step.seconds is None else step.seconds.draft + step.seconds.accept,
                verify_seconds=0.0 if step.seconds is None else step.seconds.verify,
            )
            for step, rows in zip(steps, num_rows, strict=True)
        ),
    )


def rows_read(steps: Sequence[Step], batch: int, *, few_sizes: bool) -> list[int]:
    """Compute how many rows the target reads in each verify step of a batch."""
    sizes = []
    for step in steps:
        batch = len(kept_places(range(len(step.rows)), batch, few_sizes=few_sizes))
        sizes.append(batch)
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Inputs of a trial, the same for every setting of a drafter."""

    parts: DrafterParts
    """The drafter."""
    target: HFTarget
    rule: AcceptanceRule
    answered: Sequence[Answered]

    def batches(self, size: int) -> list[Sequence[Answered]]:
        """Split the answers into batches, in order; the last one may be smaller."""
        return [self.answered[start : start + size] for start in range(0, len(self.answered), size)]

    def drafter(self, setting: Setting) -> Drafter[Any, Any]:
        """Load the drafter in this setting, as the evaluation runs it."""
        if setting is None:
            return NullDrafter()
        return proposer(load_drafter(self.parts, self.target, **setting), self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Replay of all answers with one setting and batch size, without the target."""

    setting: Setting
    batch_size: int
    run: Decoding


def replay_all(trial: Trial, settings: Sequence[Setting], batch_sizes: Sequence[int]) -> list[Replay]:
    """Replay the answers with every setting, for every batch size.

    Settings that don't fit into memory are left out.
    """
    replays = []
    with tqdm(total=len(settings) * len(batch_sizes), desc="settings", unit="setting") as progress:
        for setting in settings:
            drafter = within_memory(partial(trial.drafter, setting), trial.target)
            if drafter is None:
                progress.update(len(batch_sizes))
                continue
            for size in batch_sizes:
                if (total := within_memory(partial(_replay, trial, drafter, size), trial.target)) is not None:
                    replays.append(Replay(setting=setting, batch_size=size, run=total))
                progress.update()
    return replays


def _replay(trial: Trial, drafter: Drafter[Any, Any], batch_size: int) -> Decoding:
    groups = trial.batches(batch_size)

    def replay(group: Sequence[Answered], timed: bool) -> Decoding:
        target = ReplayTarget(group, trial.target.vocab_size, has_fixed_shapes=trial.target.has_fixed_shapes)
        return run(target, drafter, trial.rule, group, timed=timed)

    replay(groups[0], timed=False)  # warms up
    return sum_of([replay(group, timed=True) for group in groups])


def predict(replay: Replay, times: StepTimes) -> Prediction | None:
    """Predict the speed of decoding with a target of these step times.

    Returns None if one of the steps doesn't fit into memory.
    """
    total = replay.run
    steps = [times(step.rows, step.nodes) for step in total.passes]
    verify_seconds = [seconds for seconds in steps if seconds is not None]
    if len(verify_seconds) < len(steps):
        return None
    seconds = total.own_seconds + sum(verify_seconds)
    return Prediction(
        setting=replay.setting,
        batch_size=replay.batch_size,
        tokens_per_step=total.tokens_per_step,
        tokens_per_second=total.num_tokens / seconds,
        own_seconds=total.own_seconds / len(total.passes),
        num_nodes=total.num_nodes,
    )


@torch.inference_mode()
def measure_all(trial: Trial, settings: Sequence[Setting], batch_size: int, *, rounds: int = ROUNDS) -> list[Speed]:
    """Measure the speeds of several settings.

    The target decodes the same answers with every setting, batch by batch in turns. The median of
    `rounds` counts for each batch. All settings' drafters are in memory together. A setting that
    runs out of memory is left out, and all caches are released. So the others are measured again
    from the start.
    """
    fitting = list(settings)
    while fitting:
        measured = _measure_together(trial, fitting, batch_size, rounds)
        if not isinstance(measured, int):
            return measured
        del fitting[measured]
    return []


def _measure_together(trial: Trial, settings: Sequence[Setting], batch_size: int, rounds: int) -> list[Speed] | int:
    """Measure all settings, or return the index of one that ran out of memory."""
    groups = trial.batches(batch_size)
    seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
    runs: dict[tuple[int, int], Decoding] = {}

    def decode(drafter: Drafter[Any, Any], answered: Sequence[Answered]) -> Decoding | None:
        return within_memory(partial(run, trial.target, drafter, trial.rule, answered, timed=False), trial.target)

    with tqdm(total=rounds * len(groups), desc=f"batches of {batch_size}", unit="batch") as progress:
        # 1. Load and warm up a drafter for each setting.
        drafters: list[Drafter[Any, Any]] = []
        first = [replace(item, answer=item.answer[:8]) for item in groups[0]]
        for index, setting in enumerate(settings):
            drafter = within_memory(partial(trial.drafter, setting), trial.target)
            if drafter is None or decode(drafter, first) is None:  # warms up
                return index
            drafters.append(drafter)

        # 2. Decode each batch with each setting, in turns.
        for turn in range(rounds * len(groups)):
            group = turn % len(groups)
            for step in range(len(drafters)):
                index = (turn + turn // len(groups) + step) % len(drafters)  # another setting comes first in each turn
                if (decoded := decode(drafters[index], groups[group])) is None:
                    return index
                runs[index, group] = decoded
                seconds[index, group].append(decoded.seconds)
            progress.update()
    trial.target.release_cache()

    # 3. The speeds.
    totals = [sum_of([runs[index, group] for group in range(len(groups))]) for index in range(len(settings))]
    return [
        Speed(
            setting=setting,
            batch_size=batch_size,
            tokens_per_step=total.tokens_per_step,
            tokens_per_second=total.num_tokens / sum(median(seconds[index, group]) for group in range(len(groups))),
        )
        for index, (setting, total) in enumerate(zip(settings, totals, strict=True))
    ]


def sum_of(runs: Sequence[Decoding]) -> Decoding:
    """Sum the costs of several batches."""
    return Decoding(
        num_tokens=sum(part.num_tokens for part in runs),
        num_steps=sum(part.num_steps for part in runs),
        passes=tuple(step for part in runs for step in part.passes),
        seconds=sum(part.seconds for part in runs),
    )


def finalists(predictions: Sequence[Prediction], batch_size: int) -> list[Setting]:
    """Select plain decoding, and the settings that may be the fastest at this batch size."""
    of_size = [speed for speed in predictions if speed.batch_size == batch_size and speed.setting is not None]
    best = sorted(of_size, key=lambda speed: -speed.tokens_per_second)[:NUM_FINALISTS]
    close = [speed for speed in best if speed.tokens_per_second >= (1 - MARGIN) * best[0].tokens_per_second]
    return [None, *(speed.setting for speed in close)]


def choose(speeds: Sequence[Speed], batch_size: int) -> Choice:
    """Choose the fastest setting for batches of this size; plain decoding is one of them."""
    of_size = [speed for speed in speeds if speed.batch_size == batch_size]
    (plain,) = [speed for speed in of_size if speed.setting is None]
    best = max(of_size, key=lambda speed: speed.tokens_per_second)
    return Choice(
        setting=best.setting,
        tokens_per_step=best.tokens_per_step,
        tokens_per_second=best.tokens_per_second,
        plain_tokens_per_second=plain.tokens_per_second,
    )


def regret(setting: Setting, measured: Sequence[Speed], batch_size: int) -> float:
    """Compute the share by which a setting is slower than the best one at a batch size."""
    speeds = [speed for speed in measured if speed.batch_size == batch_size]
    (chosen,) = [speed.tokens_per_second for speed in speeds if speed.setting == setting]
    return 1 - chosen / max(speed.tokens_per_second for speed in speeds)
