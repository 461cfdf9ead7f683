"""A wrong evaluation config is told at once, all of it."""

import pytest
from omegaconf import OmegaConf

from outrider.eval.config import EvalConfig, SuiteConfig


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"suites is empty.*repeats is 0.*temperatures is \[-1\.0\].*too_long is 'cut'"
    ) as caught:
        EvalConfig(suites=[], repeats=0, temperatures=[-1.0], too_long="cut")
    assert "max_new_tokens" not in str(caught.value)


def test_a_suite_named_twice_is_refused_since_its_records_would_collide() -> None:
    with pytest.raises(ValueError, match="named twice"):
        EvalConfig(suites=[SuiteConfig(name="mt_bench"), SuiteConfig(name="mt_bench", limit=3)])


@pytest.mark.parametrize(
    ("acceptance", "message"), [("roughly", "must be one of exact, typical"), ("typical", "needs a temperature above 0")]
)
def test_a_rule_that_cannot_be_used_is_refused(acceptance: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvalConfig(suites=[SuiteConfig(name="stdlib")], acceptance=acceptance)


@pytest.mark.parametrize(
    ("temperatures", "message"),
    [
        ([], "temperatures is empty"),
        ([0.0, -0.5], "must be 0 .greedy. or a positive number"),
        ([float("nan")], "must be 0 .greedy. or a positive number"),
        ([float("inf")], "must be 0 .greedy. or a positive number"),
        ([0.7, 0.0, 0.7], "give each once"),
    ],
)
def test_temperatures_that_cannot_be_measured_are_refused(temperatures: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvalConfig(suites=[SuiteConfig(name="x")], temperatures=temperatures)


@pytest.mark.parametrize(
    ("batch_sizes", "message"),
    [([], "batch_sizes is empty"), ([1, 0], "must be at least 1"), ([4, 1, 4], "give each once")],
)
def test_batch_sizes_that_cannot_be_measured_are_refused(batch_sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvalConfig(suites=[SuiteConfig(name="x")], batch_sizes=batch_sizes)


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="limit of suite 'mt_bench' is 0"):
        SuiteConfig(name="mt_bench", limit=0)


def test_hydra_can_build_it_from_plain_values() -> None:
    plain = {
        "suites": [{"name": "stdlib", "limit": 4}],
        "settings": [{"beam_width": 4, "beam_length": 5}],
        "temperatures": [0, 0.7],
    }
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(EvalConfig(suites=[SuiteConfig(name="x")])), plain))
    assert isinstance(config, EvalConfig)
    assert config.suites == [SuiteConfig(name="stdlib", limit=4)]
    assert config.settings == [{"beam_width": 4, "beam_length": 5}]
    assert config.temperatures == [0.0, 0.7]
