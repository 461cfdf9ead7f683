import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from outrider.data.config import DataConfig


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"source": "csv", "path": "a"}, "source is 'csv'; it must be one of sharegpt"),
        ({"source": "sharegpt"}, "path is missing; the source sharegpt needs"),
        ({"source": "stdlib", "split": "distill", "path": "a"}, "leave it out"),
        ({"source": "stdlib"}, "split is 'train'; the splits of stdlib are target_train, target_heldout, distill, eval"),
        ({"source": "alpaca", "path": "a", "limit": 0}, "limit is 0; it must be at least 1"),
        ({"source": "alpaca", "path": "a", "max_length": 1}, "max_length is 1"),
        ({"source": "text", "path": "a", "prompt_chars_min": 10, "prompt_chars_max": 9}, "prompt_chars_min is 10"),
        ({"source": "text", "path": "a", "answer_chars": 0}, "answer_chars is 0"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_rule(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DataConfig(**values)  # type: ignore[arg-type]


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ValueError, match=r"path is missing.*limit is -1.*answer_chars is 0"):
        DataConfig(source="text", limit=-1, answer_chars=0)


def test_omegaconf_builds_it_and_refuses_unknown_keys() -> None:
    schema = OmegaConf.structured(DataConfig)
    config = OmegaConf.to_object(OmegaConf.merge(schema, {"source": "alpaca", "path": "a.json"}))
    assert config == DataConfig(source="alpaca", path="a.json")
    with pytest.raises(ConfigKeyError, match="lenght"):
        OmegaConf.merge(schema, {"lenght": 3})
