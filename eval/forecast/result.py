"""The forecast of a recipe, from what was measured: tokens per step, speedups, and a verdict.

What is accepted of a draft grows with the labels: at first by about the same amount with each doubling of them,
later by less. So a curve is what the largest sample reached, the gain of a doubling there, and the share of it that
each further doubling gains. Three short trainings can't tell that share: it was chosen by earlier, shorter trainings of
the targets that benchmarks/forecast.json records, and stays as it was.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from ..records.names import PLAIN_DECODING
from .measure import Certainty, ForecastPrompt, Steps, StepSeconds

CONFIDENCE = 0.9
SURE = 0.9
"""Probability from which the target counts as certain of its likeliest token."""
NOISY, VERY_NOISY = 1.25, 2.0
"""Ratio of the slowest turn to the fastest from which a machine is noisy: of plain decoding, and of any method."""
NUM_DRAWS = 2_000
Z_90 = 1.645
"""The normal distribution's bound of 90 %. Student's is larger by about (1 + (z^2 + 1) / 4n) with n degrees of freedom."""
KEPT, KEPT_SPREAD = 0.88, 0.1
"""Share of a doubling's gain that the next doubling gains: mean and standard deviation."""
MethodKey = tuple[str, float]
"""Label of a method, and temperature."""


class Interval(NamedTuple):
    """Median and 90 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: Float[np.ndarray, " draw"]) -> "Interval":
        """Return the interval of draws."""
        tail = (1 - CONFIDENCE) / 2
        value, low, high = np.quantile(draws, (0.5, tail, 1 - tail))
        return cls(float(value), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured on the prompts of the evaluation."""

    prompts: Sequence[ForecastPrompt]
    num_labels: list[int]
    """Of each part of the sample, ascending."""
    steps: Mapping[MethodKey, Sequence[Sequence[Steps]]]
    """By prompt, for each part; of a drafter without training once."""
    certainty: Mapping[float, Sequence[Certainty]]
    """By temperature and prompt."""
    seconds: Mapping[int, Mapping[str, StepSeconds]]
    """By batch size and label, plain decoding included, and without the paced drafters."""
    plain: Mapping[MethodKey, Sequence[Steps]] = field(default_factory=dict)
    """Plain decoding in turns with each paced drafter: of one prompt after another."""
    passes: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Seconds of a pass by tokens of the text and of the pass."""
    max_new_tokens: int
    """Limit of the evaluation's answers."""
    num_decoded: int
    """Limit of those that were measured."""

    @property
    def mean_tokens(self) -> float:
        """Mean length of an answer; one that was cut counts as long as the evaluation allows."""
        lengths = [len(one.entropies) for answers in self.certainty.values() for one in answers]
        return sum(length if length < self.num_decoded else self.max_new_tokens for length in lengths) / len(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodForecast:
    """A drafter in a setting, at a temperature."""

    label: str
    temperature: float
    measured: list[float]
    """Tokens per step after learning from each part of the sample; of a drafter without training one."""
    tokens_per_step: dict[float, Interval]
    """By multiple of the recipe's data; of a drafter without training at 1."""
    speedup: dict[int, Interval]
    """By batch size, with the recipe's data; of a paced drafter at 1 only, since it drafts otherwise for larger ones."""
    break_even: dict[int, float]
    """Tokens per step by batch size at which a step is worth its time."""

    @property
    def is_trained(self) -> bool:
        return len(self.measured) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """How certain the target is in a category."""

    category: str
    num_tokens: int
    entropy: float
    """Mean, in nats."""
    certain: float
    """Share of the tokens of which the likeliest one has at least probability SURE."""
    free: dict[str, float]
    """Tokens per step of the drafters without training."""


def foresee(measured: Measured, total_labels: float, multiples: Sequence[float], *, seed: int) -> list[MethodForecast]:
    """Continue the curves to multiples of the recipe's labels, and compute speedups from them."""
    forecasts = []
    for (label, temperature), by_part in measured.steps.items():
        # 1. Tokens per step.
        if len(by_part) > 1:
            draws = continued(measured.num_labels, by_part, [multiple * total_labels for multiple in multiples], seed=seed)
            at_recipe, intervals = draws[multiples.index(1.0)], dict(zip(multiples, map(Interval.of, draws), strict=True))
        else:
            at_recipe = resampled(by_part, seed=seed)[0]
            intervals = {1.0: Interval.of(at_recipe)}
        # 2. Speedups: prefill and steps of an answer, against those of plain decoding.
        speedup, break_even = {}, {}
        for size, seconds in measured.seconds.items():
            plain, drafted = seconds[PLAIN_DECODING], seconds.get(label)
            if drafted is not None:
                turns = np.array(drafted.steps) / np.array(plain.steps)
                ratios = np.random.default_rng(seed).choice(turns, len(at_recipe))
            elif size == 1:
                alone = resampled([measured.plain[label, temperature], by_part[-1]], seed=seed, of="seconds")
                ratios = turns = alone[1] / alone[0]
            else:
                continue
            rest = measured.mean_tokens - 1
            step = float(np.median(plain.steps))
            before = plain.prefill + rest * step
            after = (drafted or plain).prefill + rest * step * ratios / at_recipe
            speedup[size], break_even[size] = Interval.of(before / after), float(np.median(turns))
        forecasts.append(
            MethodForecast(
                label=label,
                temperature=temperature,
                measured=[sum(one.tokens for one in part) / max(1, sum(one.steps for one in part)) for part in by_part],
                tokens_per_step=intervals,
                speedup=speedup,
                break_even=break_even,
            )
        )
    return forecasts


def resampled(by_part: Sequence[Sequence[Steps]], *, seed: int, of: str = "tokens") -> Float[np.ndarray, "part draw"]:
    """Return tokens (or seconds) per step of each part over resampled prompts, the same ones in all parts.

    Resampled means of few prompts spread too little: their variance is that of n in place of n - 1, and they are normal
    where Student's t is meant (Hesterberg 2015, arXiv 1411.5279, on narrowness bias). So draws are spread by both factors.
    """
    counts = np.array([[(getattr(one, of), one.steps) for one in part] for part in by_part], dtype=float)  # [part, prompt, 2]
    num_prompts = counts.shape[1]
    picked = np.random.default_rng(seed).integers(0, num_prompts, (NUM_DRAWS, num_prompts))
    drawn, whole = _ratios(counts[:, picked].sum(2)), _ratios(counts.sum(1))[:, None]
    degrees = max(1, num_prompts - 1)
    spread = np.sqrt(num_prompts / degrees) * (1 + (Z_90**2 + 1) / (4 * degrees))
    return whole * (drawn / np.where(whole > 0, whole, 1)) ** spread


def _ratios(sums: Float[np.ndarray, "*part 2"]) -> Float[np.ndarray, "*part"]:
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def continued(
    num_labels: Sequence[int], by_part: Sequence[Sequence[Steps]], at: Sequence[float], *, seed: int
) -> Float[np.ndarray, "size draw"]:
    """Continue a curve of tokens per step to numbers of labels: [size, draw].

    `num_labels` are those of each part, ascending. A size below the largest part is on the straight line of the parts.
    """
    # 1. The line through the parts, over doublings of the labels. A drafter doesn't unlearn by more of them.
    measured = resampled(by_part, seed=seed)
    doublings = np.log2(num_labels)
    middle = doublings.mean()
    away = doublings - middle
    slope = np.maximum(away @ (measured - measured.mean(0)) / (away @ away), 0)
    reached = measured.mean(0) + slope * away[-1]
    # 2. Further doublings, each of which gains less than the one before.
    kept = np.random.default_rng(seed + 1).normal(KEPT, KEPT_SPREAD, NUM_DRAWS).clip(0.05, 0.999)
    sizes = np.log2(at) - doublings[-1]
    first = kept ** away[-1]  # the gain of the next doubling, over the line's
    gains = [slope * size if size < 0 else slope * first * (1 - kept**size) / (1 - kept) for size in sizes]
    return np.maximum(reached + np.array(gains), 1.0)


def certainty_groups(measured: Measured, temperature: float, free: Sequence[str]) -> list[Group]:
    """Return how certain the target is: the categories with most tokens first, and all last."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, prompt in enumerate(measured.prompts):
        places[prompt.category].append(place)
    groups = []
    if len(places) > 1:
        places["all"] = list(range(len(measured.prompts)))
    for category, chosen in places.items():
        answers = [measured.certainty[temperature][place] for place in chosen]
        entropies = np.concatenate([one.entropies for one in answers])
        likeliest = np.concatenate([one.likeliest for one in answers])
        by_method = {}
        for label in free:
            steps = [measured.steps[label, temperature][0][place] for place in chosen]
            by_method[label] = sum(one.tokens for one in steps) / max(1, sum(one.steps for one in steps))
        groups.append(
            Group(
                category=category,
                num_tokens=len(entropies),
                entropy=float(entropies.mean()),
                certain=float((likeliest >= SURE).mean()),
                free=by_method,
            )
        )
    return sorted(groups, key=lambda group: (group.category == "all", -group.num_tokens))


def is_noisy(measured: Measured) -> bool:
    """Return whether the turns of a method took so different times that speedups can't be trusted."""
    turns = [one.steps for seconds in measured.seconds.values() for one in seconds.values()]
    plain = [seconds[PLAIN_DECODING].steps for seconds in measured.seconds.values()]
    return any(max(steps) > NOISY * min(steps) for steps in plain) or any(
        max(steps) > VERY_NOISY * min(steps) for steps in turns
    )


def verdict(forecasts: Sequence[MethodForecast], temperature: float) -> str:
    """Return the sentence that a person acts on: train it, train it for some batch sizes, or don't."""
    here = [one for one in forecasts if one.temperature == temperature]
    trained, free = ([one for one in here if one.is_trained is kind] for kind in (True, False))
    sizes = sorted({size for one in trained for size in one.speedup})
    # 1. Where training is worth it: surely faster than plain decoding.
    at = {size: [one for one in trained if size in one.speedup] for size in sizes}
    surest = {size: max(at[size], key=lambda one: one.speedup[size].low) for size in sizes}
    without = {size: max((one.speedup[size].value for one in free if size in one.speedup), default=0.0) for size in sizes}
    gains = {size: surest[size].speedup[size] for size in sizes}
    worth = [size for size in sizes if gains[size].low > 1 and gains[size].value > without[size]]
    first = worth[0] if worth else sizes[0]
    choice = surest[first] if worth else max(at[first], key=lambda one: one.speedup[first].value)
    speed = choice.speedup[first]
    told = f"{choice.label} will be about {speed} times as fast as plain decoding at batch size {first}"
    if not worth and speed.low <= 1 < speed.high:
        text = f"Don't train it as it is: it may gain nothing. {told}"
    elif not worth:
        text = f"Don't train it: {told}"
    elif worth == sizes:
        text = f"Train it: {told}; larger ones than {sizes[-1]} weren't timed"
    elif worth == sizes[: len(worth)]:
        text = f"Train it for batch sizes up to {worth[-1]}: {told}"
    else:
        text = f"Train it for batch size {', '.join(map(str, worth))} only: {told}"
    # 2. What the best drafter without training does.
    if free := [one for one in free if first in one.speedup]:
        other = max(free, key=lambda one: one.speedup[first].value)
        already = " already" if other.speedup[first].value >= speed.value else ""
        text += f". {other.label}, which needs no training, has {other.speedup[first]} there{already}"
    return f"{text}."
