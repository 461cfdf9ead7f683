"""Script that compares our baseline with decoding by transformers."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_plain_decoding")


@pytest.mark.slow
def test_the_benchmark_of_plain_decoding_compares_tokens_and_writes_a_report(
    script: Any, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "question.jsonl"
    suite.write_text('{"question_id": 1, "category": "math", "turns": ["1 + 1", "2 + 2"]}\n')
    output = tmp_path / "plain.json"
    arguments = ["--target", tiny_target_dir, "--suite", "mt_bench", "--suite-path", suite, "--output", output]
    sizes = ["--prompts", 1, "--new-tokens", 9, "--repeats", 2, "--threads", 1]
    monkeypatch.setattr(sys, "argv", ["bench_plain_decoding.py", *map(str, arguments + sizes)])
    script.main()
    report = json.loads(output.read_text())
    assert [(cell["dtype"], cell["threads"]) for cell in report["cells"]] == [("float32", 1), ("bfloat16", 1)]
    for cell in report["cells"]:
        for clock in ("wall", "processor"):
            assert set(cell[clock]) == {"ours", "rows first", "packed", "transformers"}
            assert cell[clock]["ours"]["over_ours"] == 1.0
            assert all(values["over_ours"] > 0 for values in cell[clock].values())
        assert all(speed > 0 for speed in cell["tokens_per_second"].values())
    assert (report["num_prompts"], report["new_tokens"], report["repeats"]) == (1, 9, 2)


def test_seconds_over_ours_by_hand(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The other method takes 1.25 times our seconds in all, and half of them for most prompts."""
    ours = {"method": "baseline", "speedup": 1.0, "speedup_ci95": None, "processor_speedup": 1.0, "tokens_per_second": 9.0}
    other = {**ours, "method": "packed", "speedup": 0.8, "speedup_ci95": (0.5, 2.0), "median_speedup": 2.0}
    cell = script.compare([ours, {**other, "processor_speedup": 4.0, "disturbed": [{"ratio": 9.0}]}])
    assert cell["wall"]["ours"] == {"over_ours": 1.0, "over_ours_ci95": None, "median_over_ours": 1.0}
    assert cell["wall"]["packed"] == {"over_ours": 1.25, "over_ours_ci95": (0.5, 2.0), "median_over_ours": 0.5}
    assert cell["processor"]["packed"] == {"over_ours": 0.25}
    script.print_cell({"dtype": "float32", "threads": 1, "linears": "", **cell})
    printed = capsys.readouterr().out
    assert "float32, threads: 1 (" in printed
    assert printed.count("disturbed  <- ours is slower than the mark") == 1
