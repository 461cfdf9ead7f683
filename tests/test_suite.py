"""Coverage of the quick tests.

When a test becomes slow, every kind, rule and command must still have a quick test.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from outrider.cli import commands
from outrider.models.decoding import acceptance
from outrider.models.drafters import DRAFTERS, TRAINING_FREE
from outrider.models.drafters.losses import WEIGHTS, LossKind

from .conformance.test_architectures import CASES
from .conformance.test_drafters import MERGED, OPTIONS

CONFORMANCE = "tests/conformance/test_drafters.py"
ARCHITECTURES = "tests/conformance/test_architectures.py"
RULES = {
    "GreedyAcceptance": f"{CONFORMANCE}::test_greedy_answers_are_plain_decodings",
    "SpeculativeSampling": f"{CONFORMANCE}::test_with_the_same_seeds_plain_decoding_samples_the_same",
    "TypicalAcceptance": f"{CONFORMANCE}::test_typical_acceptance_gives_complete_answers",
}
COMMANDS = {
    "check-server": "tests/eval/server/test_check_server.py::test_a_sound_server_passes_against_the_target_here",
    "adopt": "tests/eval/results/test_adoption.py::test_a_better_drafter_takes_the_place_and_the_old_one_is_kept",
    "certify": "tests/eval/certify/test_certificate.py::test_a_target_and_a_drafter_are_certified",
    "chat": "tests/cli/test_chat.py::test_a_pipe_gets_exactly_the_texts_of_generate",
    "data suite": "tests/data/test_own_suite.py::test_a_suite_is_drawn_from_a_log_and_kept_out_of_the_training",
    "data verify": "tests/data/test_verify.py::test_an_undamaged_folder_passes",
    "eval": "tests/eval/test_cli.py::test_options_reach_the_stage_and_the_table_is_printed",
    "forecast": "tests/cli/test_forecast.py::test_a_recipe_is_forecast_from_a_part_of_it",
    "explain": "tests/eval/measure/test_trace.py::test_the_command_explains_a_finished_evaluation",
    "export": "tests/cli/test_export.py::test_an_exported_drafter_is_imported_unchanged",
    "init": "tests/cli/test_init.py::test_a_written_recipe_composes_from_any_folder_and_fits_the_target",
    "import": "tests/cli/test_export.py::test_an_exported_drafter_is_imported_unchanged",
    "options": "tests/cli/test_describe.py::test_options_are_printed_in_80_columns",
    "package": "tests/cli/test_hub.py::test_a_package_is_made_and_listed",
    "pull": "tests/models/export/test_hub.py::test_a_pushed_folder_is_pulled_byte_for_byte",
    "push": "tests/cli/test_hub.py::test_a_push_lists_the_files_that_it_leaves_out_of_a_bare_drafters_folder",
    "recipes": "tests/cli/test_describe.py::test_recipes_are_printed_with_their_choices",
    "report": "tests/eval/report/test_page.py::test_the_command_writes_one_page",
    "run": "tests/test_pipeline.py::test_one_command_distils_trains_and_evaluates",
    "watch": "tests/eval/results/test_watch.py::test_a_fall_of_one_category_is_found_and_no_text_is_printed",
    "tune": "tests/eval/tune/test_tune.py::test_the_command_prints_a_table_and_a_verdict",
}
OTHERS = [
    "tests/conformance/test_rules.py::test_every_mutant_of_the_sampler_is_caught",
    "tests/train/test_more_steps.py::test_a_kill_in_between_leaves_no_trace",
    "tests/cli/test_launcher.py::test_an_error_of_launched_processes_is_printed_once",
]
"""Quick tests of mutants, of a kill with a resume, and of a launch of two processes."""


def quick_cases(collected: Iterable[pytest.Item], test: str) -> list[dict[str, Any]]:
    """Return the parameters of each quick case of a test."""
    items = list(collected)
    if not any(item.nodeid.startswith(test.split("::")[0]) for item in items):
        pytest.skip("only a part of the tests was collected")
    cases = [item for item in items if item.nodeid.split("[")[0] == test and item.get_closest_marker("slow") is None]
    return [item.callspec.params if hasattr(item, "callspec") else {} for item in cases]


def kinds(cases: Iterable[dict[str, Any]]) -> set[str]:
    names = [case.get("name", case.get("kind", case.get("either"))) for case in cases]
    return {OPTIONS.get(name, {}).get("kind", name) for name in names}


def test_every_rule_decodes_with_every_kind(collected: list[pytest.Item]) -> None:
    names = {name for name, value in vars(acceptance).items() if hasattr(value, "lossless")}
    assert names == RULES.keys()
    for rule, test in RULES.items():
        assert kinds(quick_cases(collected, test)) == DRAFTERS.keys() | TRAINING_FREE.keys() | MERGED.keys(), rule


def test_every_kind_is_trained_with_every_loss(collected: list[pytest.Item]) -> None:
    cases = quick_cases(collected, f"{CONFORMANCE}::test_every_objective_has_a_finite_gradient")
    for loss in LossKind:
        assert kinds(case for case in cases if case["loss"] == loss) == DRAFTERS.keys(), loss
    for weights in WEIGHTS:
        assert kinds(case for case in cases if case["weights"] == weights) == DRAFTERS.keys(), weights


@pytest.mark.parametrize(
    "name",
    ["test_batches_of_trees_give_the_tokens_of_full_forwards", "test_states_of_padded_rows_equal_those_of_each_text_alone"],
)
def test_every_architecture_has_quick_cases(collected: list[pytest.Item], name: str) -> None:
    cases = quick_cases(collected, f"{ARCHITECTURES}::{name}")
    assert {case["case"] for case in cases} == CASES.keys()
    assert {case["attention"] for case in cases} == {"sdpa", "eager"}


def test_every_command_is_called(collected: list[pytest.Item]) -> None:
    assert commands.COMMANDS.keys() == COMMANDS.keys()
    for name, test in COMMANDS.items():
        assert quick_cases(collected, test), name


@pytest.mark.parametrize("test", OTHERS)
def test_mutants_kills_and_launches_have_quick_cases(collected: list[pytest.Item], test: str) -> None:
    assert quick_cases(collected, test)


def test_a_slow_test_does_not_count(collected: list[pytest.Item]) -> None:
    assert not quick_cases(collected, "tests/train/test_resume.py::test_a_run_killed_at_any_moment_resumes_to_equal_bits")
