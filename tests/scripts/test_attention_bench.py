"""GPU benchmark of attention, on a CPU with a tiny shape: forms, and what decoding would choose."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
FORMS = {"1", "4", "8", "16", "32", "flash", "math"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    bench = importlib.import_module("attention_bench")

    def run(*options: str) -> dict[str, Any]:
        output = tmp_path / "attention.json"
        small = ["--shape", "tiny", "--device", "cpu", "--queries", "1", "3", "--batches", "1", "2", "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["attention_bench.py", *small, *options])
        monkeypatch.setattr(bench, "memory_bandwidth", lambda device: 1e9)
        bench.main()
        return json.loads(output.read_text())

    return run


def test_every_case_is_measured_in_every_form(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = run("--keys", "256")
    assert len(report["rows"]) == 4
    for row in report["rows"]:
        assert set(row["milliseconds"]) == FORMS
        assert min(row["milliseconds"].values()) > 0
        assert row["gain"] == row["milliseconds"]["1"] / row["milliseconds"][str(row["chosen"])]
        assert row["bandwidth_share"] > 0
    assert not report["skipped"] + report["failed"]
    assert "| 256 | 2 | 3 |" in capsys.readouterr().out


def test_a_case_that_fails_or_comes_too_late_is_listed(run: Any) -> None:
    report = run("--keys", "250")
    assert len(report["failed"]) == 4
    assert "250" in report["failed"][0]["error"]
    assert len(run("--keys", "256", "--budget-seconds", "-1")["skipped"]) == 4
