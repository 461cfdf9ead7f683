"""Configurations of distillation: errors before any work."""

from functools import partial

import pytest

from outrider.distill.config import DistillConfig

from ..wrong_values import problems


def test_all_contradictions_are_listed_at_once() -> None:
    errors = problems(DistillConfig, features_dtype="int8", engine="openai", drafter="d")
    assert len(errors) == 3
    assert all(errors[index].startswith(start) for index, start in enumerate(["features_dtype", "drafter", "engine"]))
    assert problems(DistillConfig, feature_layers=[2, 2]) == ["feature_layers=[2, 2]: has the same value twice; give each once"]


regenerating = partial(DistillConfig, engine="decoder")


def test_a_server_needs_an_address_and_no_other_engine_takes_one() -> None:
    regenerating(engine="openai", base_url="http://localhost:8000/v1")
    with pytest.raises(ValueError, match="base_url is missing"):
        regenerating(engine="openai")
    with pytest.raises(ValueError, match="engine is 'decoder'; leave it out"):
        regenerating(base_url="http://localhost:8000/v1")
    with pytest.raises(ValueError, match="drafter_settings are set, and no drafter"):
        regenerating(drafter_settings={"beam_width": 4})
    with pytest.raises(ValueError, match="only the engine decoder uses one"):
        regenerating(engine="openai", base_url="http://localhost:8000/v1", drafter="outputs/demo/drafter")


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://host/v1", "https://me:secret@host/v1", "http://[::1"),
        *("http://host:99999/v1", "http://host/v1\n", "http://300.1.1.1/v1"),
    ],
)
def test_an_invalid_address_is_an_error_that_shows_no_password(url: str) -> None:
    with pytest.raises(ValueError, match="base_url is not an address.*OPENAI_API_KEY") as error:
        regenerating(engine="openai", base_url=url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["http://localhost:8000/v1", "https://a-b.example.com/v1/", "http://127.0.0.1:1/v1", "http://[::1]:8/v1"]
)
def test_hosts_and_addresses_of_both_versions_are_accepted(url: str) -> None:
    assert regenerating(engine="openai", base_url=url).base_url == url


def test_the_engine_batch_decides_its_batches_itself() -> None:
    regenerating(engine="batch", kv_budget_gib=0.5)
    with pytest.raises(ValueError, match="decode_batch_size is 8, and the engine batch"):
        regenerating(engine="batch", decode_batch_size=8)


def test_unused_options_of_regeneration_are_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"engine is null.*: temperature, base_url; set engine to decoder, batch, openai or vllm"
    ):
        DistillConfig(base_url="http://localhost:8000/v1", temperature=0.8)
    with pytest.raises(ValueError, match="drafter_settings"):
        DistillConfig(drafter="outputs/demo/drafter", drafter_settings={"beam_width": 4})
    DistillConfig(seed=3)  # the run's seed is passed in any case
