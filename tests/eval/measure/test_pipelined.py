"""Methods of the pipelined loop: which there are, which are refused, and what is measured."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure.methods import method_specs, recorded_methods
from outrider.eval.measure.plan import Method
from outrider.eval.measure.timing import time_generation
from outrider.models.decoding.acceptance import GreedyAcceptance
from outrider.models.decoding.loop import generate
from outrider.models.decoding.types import Step
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.saved.parts import parse_drafter_name
from outrider.models.llm.hf_target import HFTarget
from outrider.models.phases import RunCounts

SETTINGS: list[dict[str, Any]] = [{"tree_nodes": 4}, {"tree_nodes": 8}]


def config_of(decode: str, **changes: Any) -> EvalConfig:
    return EvalConfig(suites=[SuiteConfig(name="stdlib")], decode=decode, settings=SETTINGS, baselines=["suffix"], **changes)


@pytest.mark.parametrize(
    ("decode", "added"),
    [
        ("synchronous", ["suffix", "recycling tree_nodes=4", "recycling tree_nodes=8"]),
        ("pipelined", ["suffix pipelined", "recycling pipelined"]),
        (
            "both",
            [
                *("suffix", "recycling tree_nodes=4", "recycling tree_nodes=8"),
                *("suffix pipelined", "recycling pipelined"),
            ],
        ),
    ],
)
def test_both_loops_measure_each_drafter_once_more_without_the_settings_of_a_tree(decode: str, added: list[str]) -> None:
    specs = method_specs(config_of(decode), [parse_drafter_name("recycling")])
    assert list(specs) == added
    assert [spec.label for spec in specs.values() if spec.pipelined] in ([], ["Suffix, pipelined", "Recycling, pipelined"])
    recorded = recorded_methods(specs)
    assert [name for name, method in recorded.items() if "decode" in method] == [name for name in added if "pipelined" in name]


def test_tuned_settings_are_those_of_the_loop_that_waits() -> None:
    parts = parse_drafter_name("recycling")
    with pytest.raises(ValueError, match="decode is pipelined, and tuned settings .*leave --tuned out"):
        method_specs(config_of("pipelined"), [parts], tuned={parts: {(0.0, 1): {"tree_nodes": 4}}})


class CountedTarget:
    """A target that counts a run for each pass, as a target in stages does."""

    def __init__(self, target: HFTarget) -> None:
        self.target, self.run_counts = target, RunCounts(num_runs=7, num_entries=7)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def verify(self, last_token: Any, tree: Any, **options: Any) -> Any:
        counts = self.run_counts
        self.run_counts = RunCounts(num_runs=counts.num_runs + 1, num_entries=counts.num_entries + 1, num_cancelled=1)
        return self.target.verify(last_token, tree, **options)


def test_the_loop_of_a_method_decodes_and_passes_are_counted_from_the_start_of_an_answer(tiny_target: HFTarget) -> None:
    calls: list[Any] = []

    def loop(*arguments: Any, **options: Any) -> Iterator[Step]:
        calls.append(options)
        return generate(*arguments, **options)

    options: dict[str, Any] = {"max_new_tokens": 5, "stop_ids": (), "seeds": [0]}
    arguments = (NullDrafter(), GreedyAcceptance(), [torch.arange(3, 9)])
    counted = time_generation(CountedTarget(tiny_target), *arguments, **options, loop=loop)
    assert len(calls) == 1
    assert counted.runs is not None
    assert (counted.runs.num_runs, counted.runs.num_entries, counted.runs.num_cancelled) == (4, 4, 1)
    plain = time_generation(tiny_target, *arguments, **options)
    assert plain.runs is None
    assert plain.answer(0).token_ids == counted.answer(0).token_ids


def test_a_pipelined_method_has_no_phases_no_pace_and_no_sources() -> None:
    assert Method(name="plain", label="", drafter=NullDrafter()).has_phases
    assert not Method(name="pipelined", label="", drafter=NullDrafter(), loop=iter).has_phases
