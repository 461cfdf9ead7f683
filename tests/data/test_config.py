import pytest

from outrider.data.config import DataConfig, DataSource

TEXT = DataSource(source="text", path="a")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"source": "sharegpt"}, "path is missing; the source sharegpt needs"),
        ({"source": "stdlib", "split": "distill", "path": "a"}, "path is 'a', and the source stdlib takes no path; leave it"),
        ({"source": "stdlib"}, "split is 'train'; the splits of stdlib are target_train, target_heldout, distill, eval"),
        ({"source": "text", "path": "a", "prompt_chars": [10, 9]}, "give the shortest prompt first"),
        ({}, "source is missing; give the form of the records"),
        ({"source": "text", "path": "a", "weight": 2.0}, "weight is 2.0; it is an option of each of data.sources"),
        (
            {"source": "stdlib", "split": "eval", "sources": [TEXT]},
            "sources and source are set; leave out sources, or set source to null",
        ),
        ({"sources": [TEXT], "turns": 2}, "sources and turns are set; leave out sources, or set turns to 1"),
        ({"sources": [DataSource(source="text", path="a", weight=1.0), TEXT]}, "a weight to each"),
        ({"source": "self"}, "count is missing"),
        ({"source": "self", "count": 9, "path": "a"}, "path is 'a', and the source self takes no path; leave it out"),
        ({"source": "self", "count": 9, "subset": "a", "revision": "b"}, "subset is 'a'.*\n.*revision is 'b'.* set it to null"),
        ({"source": "self", "count": 9, "split": "test"}, "split is 'test'.* set it to train"),
        ({"source": "text", "path": "a", "turns": 2}, "turns: set for the source self only"),
        ({"source": "text", "path": "a", "template_options": {"a-b": 1}}, "template_options has 'a-b'"),
    ],
)
def test_values_that_cannot_work_together_are_refused(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DataConfig(**values)  # type: ignore[arg-type]
