"""Script that measures the index of SuffixDecoding."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_suffix.py"


def test_memory_and_times_of_each_text_are_written(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "suffix.json"
    options = ["--tokenizer", tiny_target_dir, "--tokens", 900, "--prompt-tokens", 300, "--output", output]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, options)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    texts = json.loads(output.read_text())["texts"]
    assert list(texts) == ["standard library", "random tokens", "one token", "two tokens in turns"]
    assert texts["random tokens"]["megabytes"] > texts["one token"]["megabytes"], "random tokens are all new n-grams"
    assert all(values["draft_microseconds"] > 0 for values in texts.values())
    lines = capsys.readouterr().out.splitlines()
    assert [name for name in texts if any(line.startswith(name) for line in lines)] == list(texts)
