"""Recorded graphs: an answer within which one was made doesn't count, so no time is that of making graphs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure import bench as measure
from outrider.eval.measure.timing import Generation
from outrider.eval.run import evaluate
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.llm import cuda_graphs as graphs
from outrider.models.llm import tree_cache
from outrider.models.llm.hf_target import HFTarget

from ...models.recorder import ReplayingRecorder

STEP = 16
"""Columns by which the read part of the cache grows: it does so in every answer."""
NEW_TOKENS = 20


@pytest.fixture
def suites(tmp_path: Path) -> list[SuiteConfig]:
    """Write short prompts, one that doesn't fit, and long ones of two turns that exceed the first cache size."""
    lengths = {
        "short": [("a" * size,) for size in (3, 9, 20, 9000)],
        "long": [("b" * 70, "c" * 30), ("d" * 90, "e")],
    }
    configs = []
    for name, prompts in lengths.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"id": str(index), "turns": turns}) + "\n" for index, turns in enumerate(prompts)))
        configs.append(SuiteConfig(name=name, path=str(path)))
    return configs


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Generation]]:
    """Collect what was decoded, and what was recorded of it, with an imitation of CUDA graphs."""
    seen: dict[str, list[Generation]] = {"decoded": [], "counted": []}
    decode, records = measure.Bench._time, measure.Bench._records

    def noted(*arguments: Any, **options: Any) -> Generation:
        seen["decoded"].append(decode(*arguments, **options))
        return seen["decoded"][-1]

    def counted(self: Any, job: Any, generation: Generation) -> Any:
        seen["counted"].append(generation)
        return records(self, job, generation)

    monkeypatch.setattr(measure.Bench, "_time", noted)
    monkeypatch.setattr(measure.Bench, "_records", counted)
    monkeypatch.setattr(graphs, "CudaGraphRecorder", ReplayingRecorder)
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", STEP)
    return seen


@pytest.fixture
def evaluate_graphed(tiny_target: HFTarget, suites: list[SuiteConfig], tmp_path: Path) -> Callable[..., Any]:
    """Evaluate plain decoding and a ReDrafter, both with CUDA graphs."""

    def run(tree_nodes: int | None = 6, **changes: Any) -> Any:
        torch.manual_seed(0)
        options = {"kind": "redrafter", "beam_width": 4, "beam_length": 3, "tree_nodes": tree_nodes}
        save_drafter(build_drafter(parse_drafter(options), tiny_target), tmp_path / "drafter", tiny_target.identity)
        graphed = HFTarget(tiny_target.model, tiny_target.tokenizer, tiny_target.identity, cuda_graphs=True)
        common: dict[str, Any] = {"suites": suites, "max_new_tokens": NEW_TOKENS, "repeats": 1, "profile_prompts": 1}
        config = EvalConfig(**common, **changes)
        return evaluate(config, graphed, graphed.tokenizer, [tmp_path / "drafter"], tmp_path / "eval")

    return run


@pytest.mark.parametrize("tree_nodes", [6, pytest.param(None, marks=pytest.mark.slow)], ids=["one size", "buckets"])
@pytest.mark.parametrize("sizes", [[1], pytest.param([1, 2], marks=[pytest.mark.slow, pytest.mark.long])])
@pytest.mark.slow
def test_no_graph_is_made_within_an_answer_that_counts(sizes, tree_nodes, evaluate_graphed, generations):
    """Rows that leave a batch, and longer prompts of a later suite, need graphs of their own."""
    rows = evaluate_graphed(tree_nodes, batch_sizes=sizes)
    assert [row["lossless"] for row in rows] == [True] * 2 * 2 * len(sizes)
    assert sum(generation.num_graphs for generation in generations["decoded"]) > 10
    assert len(generations["decoded"]) > len(generations["counted"]) > 10
    assert [generation.num_graphs for generation in generations["counted"]] == [0] * len(generations["counted"])


def test_a_warm_up_answers_two_prompts_briefly_with_each_method(tiny_target, tiny_drafter_dir, suites, tmp_path, monkeypatch):
    calls: list[tuple[int, int, int]] = []
    original = measure.time_generation

    def counted(*arguments: Any, **options: Any) -> Generation:
        calls.append((len(arguments[3]), max(map(len, arguments[3])), options["max_new_tokens"]))
        return original(*arguments, **options)

    monkeypatch.setattr(measure, "time_generation", counted)
    monkeypatch.setattr(measure, "WARMUP_TOKENS", 3)
    config = EvalConfig(suites=suites, max_new_tokens=4, profile_prompts=0, repeats=1, batch_sizes=[1, 2])
    evaluate(config, tiny_target, tiny_target.tokenizer, [tiny_drafter_dir], tmp_path)
    warm_up = [call for call in calls if call[2] == measure.WARMUP_TOKENS]
    assert warm_up == calls[: len(warm_up)], "it comes first"
    assert [num_rows for num_rows, _, _ in warm_up] == [1, 1, 1, 1, 2, 2]
    assert max(length for _, length, _ in warm_up) >= 90, "the longest prompts that fit"
