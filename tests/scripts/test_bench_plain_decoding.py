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
    sizes = ["--prompts", 1, "--new-tokens", 9, "--repeats", 2, "--threads", 1]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments + sizes)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    report = json.loads(output.read_text())
    assert [(cell["dtype"], cell["threads"]) for cell in report["cells"]] == [("float32", 1), ("bfloat16", 1)]
    for cell in report["cells"]:
        for clock in ("wall", "processor"):
            assert set(cell[clock]) == {"ours", "rows first", "packed", "transformers"}
            assert cell[clock]["ours"]["over_ours"] == pytest.approx(1.0)
            theirs, ours = (cell[clock][way]["median_seconds"] for way in ("transformers", "ours"))
            assert cell[clock]["transformers"]["median_over_ours"] == pytest.approx(theirs / ours, rel=0.5)
    assert (report["num_prompts"], report["new_tokens"], report["repeats"]) == (1, 9, 2)
