"""GPU benchmark of decoding, on a CPU with a tiny shape: every kind of case is reported."""

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.drafters.graphed import GraphedDrafter

from ..models.recorder import ReplayingRecorder

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu" / "decode_bench.py"


def run(output: Path, *options: str) -> tuple[dict, str]:
    command = [sys.executable, str(SCRIPT), "--shape", "tiny", "--device", "cpu", "--prompt-tokens", "16"]
    small = ["--steps", "6", "--warm-up", "1", "--batches", "1", "3", "--trees", "1", "8", "--output", str(output)]
    done = subprocess.run([*command, *small, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text()), done.stdout


def test_every_case_is_measured_with_one_host_read_per_step(tmp_path):
    report, printed = run(tmp_path / "decode.json", "--forms", "eager", "cuda_graph", "--acceptance", "1.0")
    assert report["failed"] == report["skipped"] == []
    rows = {(row["drafter"], row["nodes"], row["batch"]): row for row in report["rows"]}
    assert set(rows) == {
        (*case, batch) for case in [("nothing", 0), ("redrafter", 1), ("redrafter", 8), ("draft_model", 4)] for batch in (1, 3)
    }
    assert {row["host_reads"] for row in rows.values()} == {1.0}
    assert {row["form"] for row in rows.values()} == {"eager"}, "a CPU has no CUDA graphs"
    # The accepted share is an option: here the whole deepest path is accepted.
    depths = {key: row["tokens_per_step_and_row"] - 1 for key, row in rows.items()}
    expected = {("nothing", 0): 0, ("redrafter", 1): 1, ("redrafter", 8): 4, ("draft_model", 4): 4}
    assert all(depths[*case, batch] == depth for case, depth in expected.items() for batch in (1, 3))
    assert all(row["break_even"] > 0 and row["bandwidth_share"] > 0 for row in rows.values())
    assert {row["break_even"] for row in rows.values() if row["nodes"] == 0} == {1.0}
    assert printed.count("\n| eager") == len(rows)


def test_cases_beyond_the_time_budget_are_listed_as_skipped(tmp_path):
    report, _ = run(tmp_path / "decode.json", "--forms", "eager", "--budget-seconds", "0")
    assert report["rows"] == []
    assert len(report["skipped"]) == 8


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a benchmark with tiny models in which every measurement fails."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = importlib.import_module("decode_bench")
    model = script.random_llama(script.TINY, torch.float32, torch.device("cpu"))

    def fail(case: Any) -> Any:
        raise ValueError("this model can't be recorded as a CUDA graph")

    bench = script.Bench(Namespace(), model, model, 1.0)
    monkeypatch.setattr(bench, "measure", fail)
    return bench


def test_a_failed_case_does_not_stop_the_others(bench: Any) -> None:
    script = importlib.import_module("decode_bench")
    case = script.Case("eager", "nothing", 1, 0)
    for _ in range(2):
        name, record = bench.attempt(case, in_time=True)
        assert (name, record["form"]) == ("failed", "eager")
        assert "can't be recorded" in record["error"]
    assert bench.attempt(case, in_time=False)[0] == "skipped"


def test_nothing_is_measured_after_an_error_that_breaks_the_device(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some errors, CUDA fails all further work of the process."""
    script = importlib.import_module("decode_bench")
    monkeypatch.setattr(script, "is_usable", lambda device, stream: False)
    case = script.Case("cuda_graph", "nothing", 1, 0)
    assert [bench.attempt(case, in_time=True)[0] for _ in range(3)] == ["failed", "skipped", "skipped"]


def test_the_shaped_drafter_can_be_recorded(bench: Any) -> None:
    script = importlib.import_module("decode_bench")
    target = script.target_of(bench.model)
    drafter, _ = bench.drafter(script.Case("eager", "redrafter", 1, 8), target)
    graphed, recorder = GraphedDrafter(drafter, ReplayingRecorder()), ReplayingRecorder()
    recorded = script.target_of(bench.model, cuda_graphs=True, recorder=recorder)
    prompt = torch.arange(12)[None]
    rule = script.GreedyAcceptance()
    actual, expected = (
        [step.tokens for step in script.generate(on, drafting, rule, prompt, max_new_tokens=9)]
        for on, drafting in ((recorded, graphed), (target, drafter))
    )
    assert actual == expected
    assert recorder.num_replays >= 2
