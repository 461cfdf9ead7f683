"""Prediction of a drafter's fastest setting from parts that are measured separately.

The target's step is measured by batch and tree size (`StepTimes`); the drafter, the rule and the
loop run for real, over answers that the target has given once (`ReplayTarget`). The tokens of a
replay over the seconds of both is the speed of decoding, for any number of settings at the price of
drafting alone. The few fastest are then decoded with for real, in turns: what drafter and target
cost each other, such as the other's place in a cache, shows nowhere else.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from ...models.decoding.loop import generate, kept_places
from ...models.decoding.protocols import AcceptanceRule, Drafter, Target
from ...models.decoding.sampling import RowSeeds
from ...models.decoding.types import Step
from ...models.drafters import NullDrafter, load_drafter
from ...models.drafters.saved.tuned import Choice
from ...models.machine import synchronize
from ...models.target.hf_target import HFTarget
from ...models.target.packed_linears import packed_linears
from ..measure.memory import within_memory
from ..measure.methods import proposer
from .replay import Answered, ReplayTarget
from .step_times import StepTimes

Setting = dict[str, Any] | None
"""Run-time options of a drafter; None is plain decoding."""

NUM_FINALISTS = 4
MARGIN = 0.2
"""What a setting's predicted speed may lack of the best one's, as a share, for it to be decoded
with for real."""
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A setting's in batches of one size, as measured.

    Speeds as in `Choice`.
    """

    setting: Setting
    batch_size: int
    tokens_per_step: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Speed):
    """The same, as predicted."""

    own_seconds: float
    """Of drafter, rule and loop, per step: what isn't the target's."""
    num_nodes: float
    """Mean per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One verify step of a batch.

    Seconds are 0 unless phases were timed.
    """

    rows: int
    """That the target reads, copies included (`kept_places`)."""
    nodes: int
    own_seconds: float
    """Of drafter and rule."""
    verify_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """What decoding some prompts took.

    Tokens behind those of the prefills, and steps, a row each.
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
        """Mean per pass."""
        return sum(each.nodes for each in self.passes) / len(self.passes)

    @property
    def own_seconds(self) -> float:
        """All but the target's.

        Of passes with equally many rows the median counts: a moment's disturbance is no property of
        a setting.
        """
        by_rows: dict[int, list[float]] = {}
        for each in self.passes:
            by_rows.setdefault(each.rows, []).append(each.own_seconds)
        loop = self.seconds - sum(each.own_seconds + each.verify_seconds for each in self.passes)
        return loop + sum(len(seconds) * median(seconds) for seconds in by_rows.values())


def run(
    target: Target,
    drafter: Drafter[Any, Any],
    rule: AcceptanceRule,
    answered: Sequence[Answered],
    *,
    timed: bool,
) -> Decoding:
    """Decode one batch, from its first token on.

    An answer of a replay ends where it ended.
    """
    options: dict[str, Any] = {
        "max_new_tokens": [len(each.answer) for each in answered],
        "generator": RowSeeds([each.seed for each in answered]),
        "timed": timed,
    }
    stream = generate(target, drafter, rule, [each.prompt for each in answered], **options)
    next(stream)
    device = answered[0].prompt.device
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
    """Return how many rows the target reads in each verify step of a batch of this size."""
    sizes = []
    for step in steps:
        batch = len(kept_places(range(len(step.rows)), batch, few_sizes=few_sizes))
        sizes.append(batch)
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What every setting of a drafter is tried with."""

    directory: Path
    """The drafter's."""
    target: HFTarget
    rule: AcceptanceRule
    answered: Sequence[Answered]
    pack: bool
    """Whether linear layers are packed (`packed_linears`)."""

    def batches(self, size: int) -> list[Sequence[Answered]]:
        """In their order; the last one may be smaller."""
        return [self.answered[start : start + size] for start in range(0, len(self.answered), size)]

    @contextmanager
    def drafter(self, setting: Setting) -> Iterator[Drafter[Any, Any]]:
        """In this setting, as the evaluation runs it."""
        if setting is None:
            yield NullDrafter()
            return
        drafter = load_drafter(self.directory, self.target, **setting)
        with packed_linears(*([drafter] if self.pack else [])):
            yield proposer(drafter, self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A setting's decoding of all answers in batches of one size, without the target."""

    setting: Setting
    batch_size: int
    run: Decoding


def replay_all(trial: Trial, settings: Sequence[Setting], batch_sizes: Sequence[int]) -> list[Replay]:
    """Replays of the answers with every setting, for every batch size.

    Those that don't fit into memory are left out.
    """
    replays = []
    with tqdm(total=len(settings) * len(batch_sizes), desc="settings", unit="setting") as progress:
        for setting in settings:
            with ExitStack() as stack:
                drafter = within_memory(partial(stack.enter_context, trial.drafter(setting)), trial.target)
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
    """Return how fast decoding is with a target of these times.

    None where one of its steps doesn't fit into memory.
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
    """Return what is predicted, measured.

    The target decodes the same answers with every setting, batch by batch in turns. Of each batch
    the median of its `rounds` counts. All settings' drafters are in memory at once; a setting that
    runs out of it is left out, and the others are measured from the start, since their caches were
    given back.
    """
    fitting = list(settings)
    while fitting:
        measured = _measure_together(trial, fitting, batch_size, rounds)
        if not isinstance(measured, int):
            return measured
        del fitting[measured]
    return []


def _measure_together(trial: Trial, settings: Sequence[Setting], batch_size: int, rounds: int) -> list[Speed] | int:
    """Return the speeds of all settings, or the index of one that ran out of memory."""
    groups = trial.batches(batch_size)
    seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
    runs: dict[tuple[int, int], Decoding] = {}

    def decode(drafter: Drafter[Any, Any], answered: Sequence[Answered]) -> Decoding | None:
        return within_memory(partial(run, trial.target, drafter, trial.rule, answered, timed=False), trial.target)

    with ExitStack() as stack, tqdm(total=rounds * len(groups), desc=f"batches of {batch_size}", unit="batch") as progress:
        drafters: list[Drafter[Any, Any]] = []
        first = [replace(each, answer=each.answer[:8]) for each in groups[0]]
        for index, setting in enumerate(settings):
            drafter = within_memory(partial(stack.enter_context, trial.drafter(setting)), trial.target)
            if drafter is None or decode(drafter, first) is None:  # warms up
                return index
            drafters.append(drafter)
        for turn in range(rounds * len(groups)):
            group = turn % len(groups)
            for step in range(len(drafters)):
                index = (turn + turn // len(groups) + step) % len(drafters)  # nobody comes first each time
                if (decoded := decode(drafters[index], groups[group])) is None:
                    return index
                runs[index, group] = decoded
                seconds[index, group].append(decoded.seconds)
            progress.update()
    trial.target.release_cache()
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
    """Return several batches together."""
    return Decoding(
        num_tokens=sum(each.num_tokens for each in runs),
        num_steps=sum(each.num_steps for each in runs),
        passes=tuple(each for part in runs for each in part.passes),
        seconds=sum(each.seconds for each in runs),
    )


def finalists(predictions: Sequence[Prediction], batch_size: int) -> list[Setting]:
    """Plain decoding, and the settings that may be the fastest for batches of this size."""
    of_size = [each for each in predictions if each.batch_size == batch_size and each.setting is not None]
    best = sorted(of_size, key=lambda each: -each.tokens_per_second)[:NUM_FINALISTS]
    worth = [each for each in best if each.tokens_per_second >= (1 - MARGIN) * best[0].tokens_per_second]
    return [None, *(each.setting for each in worth)]


def choose(speeds: Sequence[Speed], batch_size: int) -> Choice:
    """Return the fastest way to decode batches of this size, plain decoding among them."""
    of_size = [each for each in speeds if each.batch_size == batch_size]
    (plain,) = [each for each in of_size if each.setting is None]
    best = max(of_size, key=lambda each: each.tokens_per_second)
    return Choice(
        setting=best.setting,
        tokens_per_step=best.tokens_per_step,
        tokens_per_second=best.tokens_per_second,
        plain_tokens_per_second=plain.tokens_per_second,
    )


def regret(setting: Setting, measured: Sequence[Speed], batch_size: int) -> float:
    """Return by which share a setting is slower than the best one at a batch size."""
    speeds = [each for each in measured if each.batch_size == batch_size]
    (own,) = [each.tokens_per_second for each in speeds if each.setting == setting]
    return 1 - own / max(each.tokens_per_second for each in speeds)
