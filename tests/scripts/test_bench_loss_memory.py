"""Script that measures the memory of the training loss."""

import json
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_loss_memory.py"
VOCAB, LABELS = 2048, (2048, 8192)
LOGITS_MIB = VOCAB * LABELS[1] * 4 / 2**20


def test_chunks_need_less_memory_and_cases_above_the_limit_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With this setting, freed large tensors return their pages to the system. Otherwise malloc
    # keeps a varying part of them.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))
    output = tmp_path / "loss_memory.json"
    sizes = ["--vocab-sizes", VOCAB, "--labels", *LABELS, "--hidden", 8, "--max-chunk", 2**20, "--losses", "cross_entropy"]
    sizes += ["--steps", "chunks", "--step-labels", 4096, "--step-hidden", 128]
    limit = ["--memory-limit-gib", 4 * LOGITS_MIB / 2 / 1024]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, [*sizes, *limit]), "--device", "cpu", "--output", str(output)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    report = json.loads(output.read_text())
    small, small_whole, large, large_whole, *steps = report["cases"]
    assert (large["labels"], large["method"], large_whole["method"]) == (LABELS[1], "chunks", "whole")
    assert "more than --memory-limit-gib" in large_whole["skipped"]
    assert small_whole["peak_mib"] > LOGITS_MIB / LABELS[1] * LABELS[0] * 2
    assert small["peak_mib"] < small_whole["peak_mib"]
    assert large["peak_mib"] < LOGITS_MIB / 2, (
        "a chunk has a sixteenth of all logits, and the whole loss holds several copies of them"
    )
    assert report["environment"]["num_threads"] == 1
    kept, anew = steps
    assert (kept["activations"], anew["activations"]) == ("kept", "anew")
    assert anew["peak_mib"] < kept["peak_mib"]
