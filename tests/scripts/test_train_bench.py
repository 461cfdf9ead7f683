"""GPU benchmark of training, on a CPU with a tiny shape: cases, counts and reports."""

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from outrider.distill.label.continuations import label_continuations
from outrider.models.llm.hf_target import HFTarget
from outrider.train.batches import with_hidden_states

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
ARGS = Namespace(horizon=5, agreement=0.5, steps=1, warm_up=1)
FOREVER = float("inf")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("train_bench")


@pytest.fixture
def tiny(bench: Any) -> HFTarget:
    return bench.simple_target("tiny", torch.float32, torch.device("cpu"))


def run(bench: Any, monkeypatch: pytest.MonkeyPatch, output: Path, *options: str) -> dict[str, Any]:
    small = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--lengths",
        "24",
        "40",
        "--batches",
        "1",
        "2",
        "--steps",
        "3",
        "--warm-up",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["train_bench.py", *small, "--output", str(output), *options])
    bench.main()
    return json.loads(output.read_text())


def test_every_case_is_measured(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(bench, monkeypatch, tmp_path / "train.json")
    assert report["failed"] == report["skipped"] == []
    cases = {(row["kind"], row["seq"], row["batch"]) for row in report["rows"]}
    assert cases == {(kind, seq, batch) for kind in bench.KINDS for seq in (24, 40) for batch in (1, 2)}
    for row in report["rows"]:
        assert row["rounds"] == 3
        assert row["tokens_per_second"] == pytest.approx(row["seq"] * row["batch"] / row["seconds"])
        assert row["matrix_share"] > 0
        assert row["kind"] == "distill" or row["target_seconds"] > 0
        assert row["peak_memory_bytes"] is None, "a CPU has no counter of its own"
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n| {kind} ") == 4 for kind in bench.KINDS)


def test_cases_beyond_the_time_limit_are_listed_as_skipped(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = run(bench, monkeypatch, tmp_path / "train.json", "--minutes", "0")
    assert report["rows"] == report["failed"] == []
    assert len(report["skipped"]) == 16


def test_a_case_that_runs_out_of_memory_does_not_stop_the_others(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = bench.random_batch

    def too_large(case: Any, *args: Any) -> Any:
        if case.num_tokens == 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB")
        return whole(case, *args)

    monkeypatch.setattr(bench, "random_batch", too_large)
    report = run(bench, monkeypatch, tmp_path / "train.json", "--kinds", "medusa", "distill")
    assert len(report["rows"]) == 7
    (failed,) = report["failed"]
    assert (failed["kind"], failed["seq"], failed["batch"]) == ("medusa", 40, 1)
    assert failed["error"].startswith("out of memory: ")


@pytest.mark.parametrize("kind", ["redrafter", "medusa", "eagle3"])
def test_the_formula_of_a_training_step_equals_torchs_count(bench: Any, tiny: HFTarget, kind: str) -> None:
    case = bench.Case(kind, 40, 3)
    step = bench.TrainingStep(bench.TRAININGS[kind], kind, tiny, ARGS, FOREVER)
    batch = bench.random_batch(case, tiny.vocab_size, ARGS.horizon, 60)
    # numbers of text tokens to which the target's head is applied: those with a label on the text
    taught: list[int] = []
    if step.objective.head is not None:
        step.objective.head.register_forward_hook(lambda head, inputs, logits: taught.append(len(logits)))
    with FlopCounterMode(display=False) as counter:
        step.drafter.loss(with_hidden_states(batch, tiny, step.reads), step.objective).sums.sum().backward()
    needed = step.operations(case, int(batch.positions.sum())).linear
    assert batch.positions.sum() == 60
    # transformers' attention also computes queries and outputs of the text before the branches,
    # although they are unused.
    if kind == "eagle3":
        assert 0.5 * case.num_tokens < sum(taught) <= case.num_tokens
        needed += 2 * 3 * tiny.hidden_size**2 * case.num_tokens
        # The formula gives an upper bound for the head.
        needed -= 2 * tiny.hidden_size * tiny.vocab_size * (case.num_tokens - sum(taught))
    assert linear_operations(counter) == needed


def test_the_formula_of_labelling_equals_torchs_count(bench: Any, tiny: HFTarget) -> None:
    case = bench.Case("distill", 100, 4)
    texts = bench.written_texts(bench.next_tokens(tiny), case, 0.7)
    everywhere = torch.ones_like(texts, dtype=torch.bool)
    with FlopCounterMode(display=False) as counter:
        _, _, stats = label_continuations(tiny, texts, everywhere, everywhere, horizon=5)
    assert stats.num_agreeing / stats.num_positions == pytest.approx(0.7, abs=0.07)
    assert 0 < stats.num_branch_tokens < 4 * 400
    operations = bench.train_flops.labelling(tiny.model.config, 4, 100, stats.num_branch_tokens)
    assert linear_operations(counter) == operations.linear


def linear_operations(counter: FlopCounterMode) -> int:
    """Count operations of linear layers; attention has other kinds of products."""
    counts = counter.get_flop_counts()["Global"]
    return counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
