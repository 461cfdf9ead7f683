"""The evaluation config: one error lists all its wrong values."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from outrider.eval.config import EvalConfig, SuiteConfig, stage_problems, suite_of

from ..wrong_values import problems


def test_all_wrong_values_are_listed_at_once() -> None:
    values = {
        "repeats": 0,
        "temperatures": [-1.0, float("nan")],
        "batch_sizes": [4, 1, 4],
    }
    assert problems(EvalConfig, suites=[], settings=[], acceptance="roughly", **values) == [
        "suites=[]: must not be empty",
        "settings=[]: must not be empty",
        "temperatures[0]=-1.0: must be at least 0",
        "temperatures[1]=NaN: must be a finite number",
        'acceptance="roughly": must be one of exact, typical',
        "batch_sizes=[4, 1, 4]: has the same value twice; give each once",
        "repeats=0: must be above 0",
    ]
    assert problems(SuiteConfig, name="mt_bench", limit=0) == ["limit=0: must be above 0"]


def test_typical_acceptance_needs_a_temperature() -> None:
    with pytest.raises(ValueError, match="needs a temperature above 0"):
        EvalConfig(suites=[SuiteConfig(name="stdlib")], acceptance="typical")


def test_pipelined_decoding_refuses_what_depends_on_the_clock():
    with pytest.raises(ValueError, match="decode is pipelined, .*acceptance is typical.*set acceptance=exact"):
        EvalConfig(suites=[SuiteConfig(name="stdlib")], decode="pipelined", acceptance="typical", temperatures=[1.0])


def test_stages_and_the_loop_must_fit() -> None:
    plain = EvalConfig(suites=[SuiteConfig(name="stdlib")])
    pipelined, both = (replace(plain, decode=decode) for decode in ("pipelined", "both"))
    assert stage_problems(plain, None) == stage_problems(plain, [4, 4]) == stage_problems(both, [8]) == []
    (problem,) = stage_problems(plain, [4, 4], {"redrafter", "eagle3"})
    assert "eagle3, which reads the inputs of the target's inner layers" in problem
    assert stage_problems(plain, None, {"eagle3"}) == stage_problems(plain, [4, 4], {"eagle"}) == []
    (problem,) = stage_problems(pipelined, None)
    assert "decode is pipelined" in problem
    assert "stage_layers is not set; give" in problem
    (batch,) = stage_problems(replace(plain, batch_sizes=[1, 2]), [4, 4])
    assert "stage_layers is [4, 4], and batch_sizes is [1, 2]" in batch


def test_a_file_of_prompts_is_a_suite_that_is_named_after_it() -> None:
    suites = EvalConfig(suites=["mt_bench", "a/mine.jsonl", "b.x.json.gz", "c/humans.ndjson", SuiteConfig(name="gsm8k")]).suites  # type: ignore[list-item]
    assert [(suite.name, suite.path) for suite in suites] == [
        ("mt_bench", None),
        ("mine", "a/mine.jsonl"),
        ("b.x", "b.x.json.gz"),
        ("humans", "c/humans.ndjson"),
        ("gsm8k", None),
    ]
    with pytest.raises(ValueError, match=r"2 suites have the name 'mine' \(a/mine.jsonl, b/mine.jsonl\)"):
        EvalConfig(suites=["a/mine.jsonl", "b/mine.jsonl"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="would be named stdlib"):
        suite_of("stdlib.jsonl")


def test_a_baseline_is_a_drafter_that_needs_no_training() -> None:
    config = EvalConfig(suites=["stdlib"], baselines=["suffix", "draft_model:user/small"])
    assert config.baselines == ["suffix", "draft_model:user/small"]
    with pytest.raises(ValidationError, match=r"must be one of .*or draft_model:MODEL; did you mean suffix"):
        EvalConfig(suites=["stdlib"], baselines=["sufix"])
    with pytest.raises(ValidationError, match="must be one of"):
        EvalConfig(suites=["stdlib"], merge=["draft_model:user/small"])
