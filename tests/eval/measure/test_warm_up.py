"""The warm-up: it visits every shape, so no graph is recorded in a timed answer."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.suites import load_suite
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure import bench as measure
from outrider.eval.measure import warm_up
from outrider.eval.measure.bench import Bench
from outrider.eval.measure.timing import Generation
from outrider.eval.measure.warm_up import Lengths, Shape, num_recordings, reachable_sizes, shapes_of, text_lengths, visit
from outrider.eval.run import evaluate
from outrider.models.decoding import GreedyAcceptance
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter, save_drafter
from outrider.models.llm import cuda_graphs as graphs
from outrider.models.llm import tree_cache
from outrider.models.llm.hf_target import HFTarget

from ...models.recorder import ReplayingRecorder

STEP = 16
"""Columns by which the read part of the cache grows: it does so in every answer."""
NEW_TOKENS = 40


@pytest.fixture
def suites(tmp_path: Path) -> list[SuiteConfig]:
    """Write short prompts, and long ones of two turns that exceed the first cache size."""
    lengths = {"short": [("a" * size,) for size in (3, 9, 20)], "long": [("b" * 70, "c" * 30), ("d" * 90, "e")]}
    configs = []
    for name, prompts in lengths.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"id": str(index), "turns": turns}) + "\n" for index, turns in enumerate(prompts)))
        configs.append(SuiteConfig(name=name, path=str(path)))
    return configs


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Count the recordings made while an answer was measured (True) and otherwise (False)."""
    counts: Counter[bool] = Counter()
    depth = 0

    class Counting(ReplayingRecorder):
        def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            counts[depth > 0] += 1
            return super().__call__(function)

    measured = Bench._records

    def counted(*arguments: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return measured(*arguments)
        finally:
            depth -= 1

    monkeypatch.setattr(Bench, "_records", counted)
    monkeypatch.setattr(graphs, "CudaGraphRecorder", Counting)
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 1000)
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", STEP)
    return counts


@pytest.fixture
def evaluate_graphed(
    tiny_target: HFTarget, suites: list[SuiteConfig], tmp_path: Path
) -> Callable[..., list[measure.EvalRecord]]:
    """Evaluate plain decoding and a ReDrafter, both with CUDA graphs."""

    def run(tree_nodes: int | None = 6, **changes: Any) -> Any:
        torch.manual_seed(0)
        options = {"kind": "redrafter", "beam_width": 4, "beam_length": 3, "tree_nodes": tree_nodes}
        save_drafter(build_drafter(parse_drafter(options), tiny_target), tmp_path / "drafter", tiny_target.identity)
        graphed = HFTarget(tiny_target.model, tiny_target.tokenizer, tiny_target.identity, cuda_graphs=True)
        common: dict[str, Any] = {"suites": suites, "max_new_tokens": NEW_TOKENS}
        config = EvalConfig(**common, memory_bandwidth_gbs=10.0, profile_prompts=1, **changes)
        return evaluate(config, graphed, graphed.tokenizer, [tmp_path / "drafter"], tmp_path / "eval")

    return run


@pytest.mark.parametrize("tree_nodes", [6, pytest.param(None, marks=pytest.mark.slow)], ids=["one size", "buckets"])
@pytest.mark.parametrize("sizes", [[1], pytest.param([1, 2], marks=[pytest.mark.slow, pytest.mark.long])])
def test_no_graph_is_recorded_while_an_answer_is_measured(
    sizes: list[int], tree_nodes: int | None, evaluate_graphed: Callable[..., Any], recordings: Counter[bool]
) -> None:
    rows = evaluate_graphed(tree_nodes, batch_sizes=sizes)
    assert [row["lossless"] for row in rows] == [True] * 2 * 2 * len(sizes)
    assert recordings[False] > 10
    assert recordings[True] == 0, "rows that leave a batch, and longer prompts of a later suite, were visited too"


@pytest.mark.slow
def test_without_a_warm_up_graphs_are_recorded_during_the_measurement(
    evaluate_graphed: Callable[..., Any], recordings: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "visit", lambda *arguments: None)
    evaluate_graphed(batch_sizes=[1])
    assert recordings[True] > 3


def test_an_eager_target_has_no_warm_up_of_shapes(
    tiny_target: HFTarget, tiny_drafter_dir: Path, suites: list[SuiteConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "visit", None)
    config = EvalConfig(suites=suites, max_new_tokens=4, profile_prompts=0, memory_bandwidth_gbs=10.0)
    assert len(evaluate(config, tiny_target, tiny_target.tokenizer, [tiny_drafter_dir], tmp_path)) == 4


class Nodes(NullDrafter):
    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes


def test_every_extent_and_number_of_rows_is_a_shape_and_the_largest_comes_first() -> None:
    plain, tree = Nodes(0), Nodes(5)
    shapes = shapes_of({plain: {1}, tree: {1, 2}}, Lengths(shortest=3, longest=20), extent_step=8, context_length=100)
    actual = {(shape.drafter, shape.num_rows): [] for shape in shapes}
    for shape in shapes:
        extent = shape.length + 1 + shape.drafter.max_nodes
        assert extent % 8 == 0
        actual[shape.drafter, shape.num_rows].append(extent)
    # Behind 3 tokens a plain step reads 4 columns, and one with a tree 9; behind 20 it is up to 26.
    assert actual == {(tree, 2): [32, 24, 16], (tree, 1): [32, 24, 16], (plain, 1): [32, 24, 16, 8]}
    assert (shapes[0].drafter, shapes[0].num_rows) == (tree, 2)
    small = shapes_of({tree: {1}}, Lengths(shortest=3, longest=20), extent_step=8, context_length=20)
    assert max(shape.length for shape in small) == 18, "the prompt leaves room for two tokens"


def test_a_drafter_in_buckets_has_a_shape_for_each_size_of_its_trees(tiny_target: HFTarget) -> None:
    options = {"kind": "redrafter", "beam_width": 4, "beam_length": 5, "tree_padding": "bucket"}
    drafter = build_drafter(parse_drafter(options), tiny_target)
    shapes = shapes_of({drafter: {1}}, Lengths(shortest=3, longest=5), extent_step=64, context_length=100)
    actual = sorted((shape.num_nodes, shape.length + 1 + shape.num_nodes) for shape in shapes)
    assert actual == [(nodes, 64) for nodes in (4, 8, 12, 16, 20)]


def test_warmed_batch_sizes_are_the_full_the_last_and_powers_of_two() -> None:
    assert reachable_sizes(1, 30) == {1}
    assert reachable_sizes(8, 30) == {8, 6, 4, 2, 1}
    assert reachable_sizes(12, 24) == {12, 8, 4, 2, 1}


def test_the_length_of_a_text_includes_its_turns_and_answers(tiny_target: HFTarget, suites: list[SuiteConfig]) -> None:
    prompts = [load_suite(suite.name, suite.path, None, 0, None) for suite in suites]
    lengths = text_lengths(prompts, tiny_target.tokenizer, max_new_tokens=NEW_TOKENS, context_length=1024)
    assert lengths.shortest <= 3 + 2
    assert 70 + 30 + 2 * NEW_TOKENS <= lengths.longest <= 70 + 30 + 2 * NEW_TOKENS + 8
    lengths = text_lengths(prompts, tiny_target.tokenizer, max_new_tokens=NEW_TOKENS, context_length=70)
    assert lengths.longest < 70, "prompts that have no room are never answered"


def test_a_shape_that_does_not_fit_into_memory_is_left_out_and_the_rest_is_warmed(
    tiny_target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an out-of-memory error all caches and their recordings are freed."""
    taken: list[tuple[int, int]] = []

    def take(target: Any, drafter: Any, rule: Any, prompts: list[torch.Tensor], **options: Any) -> Any:
        taken.append((len(prompts), len(prompts[0])))
        if len(prompts) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Generation(steps=[], prefill_seconds=1.0, decode_seconds=0.0, processor_seconds=1.0)

    monkeypatch.setattr(warm_up, "time_generation", take)
    drafter = Nodes(0)
    shapes = [Shape(drafter=drafter, num_rows=rows, length=length, num_nodes=0) for rows in (4, 2, 1) for length in (9, 5)]
    visit(shapes, torch.tensor([1, 2]), tiny_target, GreedyAcceptance())
    assert taken == [(4, 9), (4, 5), (2, 9), *[(4, 5), (2, 5)], *[(1, 9), (1, 5)]], "without what needs as much, from the start"


def test_drafters_share_the_targets_recordings() -> None:
    lengths = Lengths(shortest=3, longest=20)
    one, other, plain = Nodes(5), Nodes(5), Nodes(0)
    alone = shapes_of({one: {1, 2}, plain: {1}}, lengths, extent_step=8, context_length=100)
    both = shapes_of({one: {1, 2}, other: {1, 2}, plain: {1}}, lengths, extent_step=8, context_length=100)
    assert num_recordings(alone, 8) == len(alone) == 2 * 3 + 4
    assert len(both) == 2 * 2 * 3 + 4
    assert num_recordings(both, 8) == num_recordings(alone, 8)
    other.feature_layers = (1,)
    assert num_recordings(both, 8) == len(both), "a recording has the inputs of some layers"


@pytest.mark.slow
@pytest.mark.parametrize("num_kept", [3, 1000])
def test_more_shapes_than_recordings_are_kept_is_a_warning(
    num_kept: int,
    evaluate_graphed: Callable[..., Any],
    recordings: Counter[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", num_kept)
    evaluate_graphed(batch_sizes=[1])
    warnings = [record.getMessage() for record in caplog.records if "shapes are planned" in record.getMessage()]
    assert len(warnings) == (num_kept == 3), "one, however often caches were cold"
    for warning in warnings:
        assert "the target keeps 3 recordings" in warning
        assert "give fewer settings or batch sizes, or measure each in a separate" in warning
