"""Config changes that extend an evaluation's folder, and those that need another folder."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.data.fields import differences
from outrider.eval.records.run_files import RECORDED_OPTIONS, RunInfo

from ..conftest import ENVIRONMENT, ROOFLINE

METHOD: dict[str, Any] = {"config": {}, "setting": {}, "weights": "w"}
CONFIG: dict[str, Any] = {
    **dict.fromkeys(RECORDED_OPTIONS, 1),
    "suites": {"a": "1"},
    "target": {"dtype": "torch.float32"},
    "temperatures": [0.0],
    "batch_sizes": [1, 4],
    "methods": {"d": METHOD, "d tuned": {**METHOD, "places": [[0.0, 1], [0.0, 4]]}},
}


@pytest.fixture
def info() -> RunInfo:
    return RunInfo(config=CONFIG, environment=ENVIRONMENT, roofline=ROOFLINE)


def tuned(*places: list[float], **methods: dict[str, Any]) -> dict[str, Any]:
    return {"methods": {"d": METHOD, "d tuned": {**METHOD, "places": list(places)}, **methods}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"suites": {"b": "2", "a": "1"}},
        {"temperatures": [0.7, 0.0], "batch_sizes": [4, 2, 1]},
        {"batch_sizes": [1, 4, 8], **tuned([0.0, 1], [0.0, 4], [0.0, 8])},
        {"batch_sizes": [1, 4, 8], **tuned([0.0, 1], [0.0, 4], off={**METHOD, "setting": None, "places": [[0.0, 8]]})},
    ],
)
def test_an_extended_config_is_the_same_evaluation(info: RunInfo, changes: dict[str, Any]) -> None:
    requested = {**CONFIG, **changes}
    assert differences(info.config, info.within(requested)) == {}
    assert replace(info, config=requested).config_digest == info.config_digest, "its records would be refused"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suites": {"b": "2"}}, "suites.a (was '1', is None)"),
        ({"suites": {"a": "2"}}, "suites.a (was '1', is '2')"),
        ({"batch_sizes": [4]}, "batch_sizes (was [1, 4], is [4])"),
        ({"temperatures": [0.7]}, "temperatures (was [0.0], is [])"),
        ({"methods": {**CONFIG["methods"], "e": METHOD}}, "methods.e (was None"),
        ({"methods": {"d": METHOD}}, "methods.d tuned (was {"),
        (
            tuned([0.0, 1], off={**METHOD, "places": [[0.0, 4]]}),
            "methods.d tuned.places (was [[0.0, 1], [0.0, 4]], is [[0.0, 1]])",
        ),
        ({"seed": 2}, "seed (was 1, is 2)"),
    ],
)
def test_a_smaller_or_changed_config_is_another_evaluation(info: RunInfo, changes: dict[str, Any], message: str) -> None:
    assert any(text.startswith(message) for text in differences(info.config, info.within({**CONFIG, **changes})).values())


def test_a_description_that_lacks_something_is_refused(info: RunInfo) -> None:
    with pytest.raises(ValueError, match="config lacks seed, suites; restore"):
        replace(info, config={name: value for name, value in CONFIG.items() if name not in ("seed", "suites")})
