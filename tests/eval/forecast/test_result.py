"""The forecast from measurements: speedups by their formula, groups, and the sentence that a person acts on."""

import re

import numpy as np
import pytest
import torch

from outrider.eval.forecast.measure import Certainty, ForecastPrompt, Steps, StepSeconds
from outrider.eval.forecast.result import Interval, Measured, MethodForecast, certainty_groups, foresee, is_noisy, verdict
from outrider.eval.records.names import PLAIN_DECODING

PARTS = [1_000, 2_000, 4_000]
PROMPTS = [ForecastPrompt(suite="a", category=name, input_ids=torch.tensor([1])) for name in ("x", "x", "y")]


def measured(**changes) -> Measured:
    steps = [[Steps(tokens=60 + 10 * part + row, steps=50) for row in range(3)] for part in range(3)]
    seconds = {"prefill": 1.0, "draft": 0.0}
    return Measured(
        **{
            "prompts": PROMPTS,
            "num_labels": PARTS,
            "steps": {("Suffix", 0.0): [[Steps(tokens=90, steps=45)] * 3], ("Medusa", 0.0): steps},
            "certainty": {0.0: [Certainty(entropies=[float(row)] * 11, likeliest=[0.95, *[0.5] * 10]) for row in range(3)]},
            "seconds": {
                1: {
                    PLAIN_DECODING: StepSeconds(steps=[0.1, 0.1, 0.1], **seconds),
                    "Suffix": StepSeconds(steps=[0.15, 0.15, 0.15], **seconds),
                    "Medusa": StepSeconds(steps=[0.12, 0.12, 0.12], **seconds),
                }
            },
            "max_new_tokens": 21,
            "num_decoded": 11,
            **changes,
        }
    )


def test_a_measured_drafters_speedup_is_that_of_whole_answers():
    suffix = foresee(measured(), 16_000.0, [0.5, 1.0, 2.0], seed=0)[0]
    assert suffix.measured == [2.0]
    assert not suffix.is_trained
    assert suffix.tokens_per_step[1.0] == pytest.approx((2.0, 2.0, 2.0))
    assert suffix.break_even[1] == pytest.approx(1.5)
    # All answers were cut, so they count 21 tokens: a prefill, and 20 by steps.
    assert suffix.speedup[1].value == pytest.approx((1 + 20 * 0.1) / (1 + 20 * 0.15 / 2))


def test_a_paced_drafters_speedup_is_that_of_prompts_alone():
    plain = {("Medusa + Suffix", 0.0): [Steps(tokens=100, steps=100, seconds=10.0 + row) for row in range(3)]}
    steps = [[Steps(tokens=200 + 20 * part, steps=100, seconds=16.5) for _ in range(3)] for part in range(3)]
    four = {PLAIN_DECODING: StepSeconds(steps=[0.2], prefill=1.0, draft=0.0)}
    alone = measured(steps={("Medusa + Suffix", 0.0): steps}, plain=plain, seconds={**measured(steps={}).seconds, 4: four})
    (merge,) = foresee(alone, 4_000.0, [0.5, 1.0, 2.0], seed=0)
    assert merge.measured == [2.0, 2.2, 2.4]
    assert merge.speedup.keys() == {1}
    assert merge.break_even[1] == pytest.approx(1.5, rel=1e-3)  # 16.5 over 11 seconds
    assert merge.speedup[1].value == pytest.approx((1 + 20 * 0.1) / (1 + 20 * 0.1 * 1.5 / 2.4), rel=0.02)
    assert merge.speedup[1].low < merge.speedup[1].high
    assert verdict([merge], 0.0).endswith("at batch size 1; larger ones than 1 weren't timed.")


def test_a_trained_drafters_curve_goes_on():
    medusa = foresee(measured(), 16_000.0, [0.5, 1.0, 2.0], seed=0)[1]
    assert medusa.measured == pytest.approx([61 / 50, 71 / 50, 81 / 50])
    values = [medusa.tokens_per_step[multiple].value for multiple in (0.5, 1.0, 2.0)]
    assert medusa.measured[-1] < values[0] < values[1] < values[2]
    assert all(interval.low < interval.value < interval.high for interval in medusa.tokens_per_step.values())


def test_groups_are_categories_and_all():
    groups = certainty_groups(measured(), 0.0, ["Suffix"])
    assert [(group.category, group.num_tokens, group.entropy) for group in groups] == [
        ("x", 22, 0.5),
        ("y", 11, 2.0),
        ("all", 33, 1.0),
    ]
    assert groups[0].certain == pytest.approx(1 / 11)
    assert groups[0].free == {"Suffix": 2.0}


def of(label: str, *speedups: tuple[float, float, float], trained: bool = True) -> MethodForecast:
    return MethodForecast(
        label=label,
        temperature=0.0,
        measured=[1.2, 1.3, 1.4] if trained else [1.4],
        tokens_per_step={},
        speedup=dict(zip((1, 4, 16), map(Interval._make, speedups), strict=False)),
        break_even={},
    )


SURE = (1.05, 1.02, 1.08)
GOOD, SMALL, BAD = (1.8, 1.5, 2.1), (1.1, 0.9, 1.3), (0.7, 0.6, 0.8)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ([of("A", GOOD, GOOD, GOOD)], "^Train it: A will be about 1.80 .1.50, 2.10. times as fast .* at batch size 1"),
        (
            [of("A", GOOD, GOOD, BAD), of("B", BAD, BAD, BAD)],
            "^Train it for batch sizes up to 4: A will be about 1.80 .* at batch size 1",
        ),
        ([of("A", SMALL, BAD, BAD)], "^Don't train it as it is: it may gain nothing. A will be about 1.10"),
        ([of("A", BAD, BAD, BAD)], "^Don't train it: A will be about 0.70 .0.60, 0.80. times"),
        ([of("A", SMALL, GOOD, BAD)], "^Train it for batch size 4 only: A will be about 1.80"),
        ([of("A", SMALL, SMALL, SMALL), of("B", SURE, BAD, BAD)], "^Train it for batch sizes up to 1: B will be about 1.05"),
        (
            [of("A", SMALL, SMALL, SMALL), of("F", GOOD, BAD, BAD, trained=False)],
            "F, which needs no training, has 1.80 .* there already.$",
        ),
        (
            [of("A", GOOD, SMALL, SMALL), of("F", SURE, BAD, BAD, trained=False)],
            "1. F, which needs no training, has 1.05 .* there.$",
        ),
        ([of("A", SMALL, SURE, BAD), of("A + F", GOOD)], "^Train it for batch sizes up to 4: A . F will be about 1.80"),
        (
            [of("A", BAD, SURE, BAD), of("A + F", BAD), of("F", GOOD, trained=False)],
            "^Train it for batch size 4 only: A will.*4.$",
        ),
        (
            [of("A", SURE, SURE, SURE), of("F", GOOD, GOOD, GOOD, trained=False)],
            "^Don't train it: A will be about 1.05 .* F, which needs no training, has 1.80 .* there already.$",
        ),
        (
            [of("A", SURE, SURE, SURE), of("F", GOOD, trained=False)],
            "^Train it for batch size 4, 16 only: A will be",
        ),
    ],
)
def test_the_verdict_is_one_sentence_to_act_on(methods, words):
    text = verdict(methods, 0.0)
    assert re.search(words, text)
    assert text.endswith(".")


def test_an_interval_holds_nine_tenths_of_the_draws():
    interval = Interval.of(np.arange(1001.0))
    assert interval == pytest.approx((500.0, 50.0, 950.0))


def test_turns_of_different_speeds_are_noise():
    steady = measured()
    assert not is_noisy(steady)
    slow = StepSeconds(steps=[0.1, 0.2, 0.1], prefill=1.0, draft=0.0)
    assert is_noisy(measured(seconds={1: steady.seconds[1], 4: {**steady.seconds[1], PLAIN_DECODING: slow}}))


def test_answers_that_end_are_as_long_as_they_are():
    certainty = {0.0: [Certainty(entropies=[0.0] * count, likeliest=[1.0] * count) for count in (5, 8, 11)]}
    assert measured(certainty=certainty).mean_tokens == (5 + 8 + 21) / 3
