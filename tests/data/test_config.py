import pytest

from outrider.data.config import DataConfig

from ..wrong_values import problems


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"source": "sharegpt"}, "path is missing; the source sharegpt needs"),
        ({"source": "stdlib", "split": "distill", "path": "a"}, "leave it out"),
        ({"source": "stdlib"}, "split is 'train'; the splits of stdlib are target_train, target_heldout, distill, eval"),
        ({"source": "text", "path": "a", "prompt_chars": [10, 9]}, "give the shortest prompt first"),
    ],
)
def test_values_that_cannot_work_together_are_refused(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DataConfig(**values)  # type: ignore[arg-type]


def test_all_wrong_values_are_listed_at_once() -> None:
    values = {"limit": 0, "max_length": 1, "seed": -1, "overlap_words": 0, "prompt_chars": [0]}
    assert problems(DataConfig, source="csv", **values) == [
        'source="csv": must be one of sharegpt, messages, alpaca, text, stdlib',
        "limit=0: must be above 0",
        "max_length=1: must be at least 2",
        "seed=-1: must be at least 0",
        "overlap_words=0: must be above 0",
        "prompt_chars[0]=0: must be above 0",
    ]
