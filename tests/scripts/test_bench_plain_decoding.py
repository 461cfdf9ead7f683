"""Script that compares our baseline with decoding by transformers."""

import json
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_plain_decoding.py"


def test_the_benchmark_of_plain_decoding_compares_tokens_and_writes_a_report(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "question.jsonl"
    suite.write_text('{"question_id": 1, "category": "math", "turns": ["1 + 1", "2 + 2"]}\n')
    output = tmp_path / "plain.json"
    arguments = ["--target", tiny_target_dir, "--suite", "mt_bench", "--suite-path", suite, "--output", output]
    sizes = ["--prompts", 1, "--new-tokens", 9, "--repeats", 2]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments + sizes)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    report = json.loads(output.read_text())
    assert report["tokens_equal"] is True
    assert report["ratio_of_medians"] == pytest.approx(report["transformers_median_seconds"] / report["ours_median_seconds"])
    assert (report["num_prompts"], report["new_tokens"], report["repeats"]) == (1, 9, 2)
