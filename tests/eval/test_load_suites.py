"""Unreadable suites: one error names them all and the option to give."""

import pytest

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.run import load_suites


def test_all_suites_that_cant_be_read_are_one_error_with_the_option_to_give() -> None:
    suites = [SuiteConfig(name="mt_bench", limit=3), SuiteConfig(name="stdlib", limit=2), SuiteConfig(name="spec_bench")]
    with pytest.raises(ValueError, match=r"mt_bench_prompts.*spec_bench isn't on the Hub") as error:
        load_suites(EvalConfig(suites=suites))
    assert str(error.value).endswith("Give local files: eval.suites=[{name: NAME, path: FILE}]")


@pytest.mark.parametrize(
    ("suite", "remedy"),
    [
        (SuiteConfig(name="mine", path="nofile.jsonl"), "Give an existing file"),
        (SuiteConfig(name="mtbench"), "did you mean mt_bench"),
    ],
)
def test_a_missing_file_and_an_unknown_name_have_their_remedies(suite: SuiteConfig, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy) as error:
        load_suites(EvalConfig(suites=[suite]))
    assert "eval.suites" not in str(error.value)
