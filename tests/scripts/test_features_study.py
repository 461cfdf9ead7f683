"""scripts/features_study.py: its tables of the target's stored hidden states."""

import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "features_study.py"


def test_the_docs_list_the_bytes_of_a_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--bytes"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 6
    page = (REPOSITORY / "docs" / "explanation" / "labels.md").read_text()
    for row in rows:
        assert row in page


def test_the_table_lists_tokens_per_step_of_every_seed() -> None:
    table = runpy.run_path(str(SCRIPT))["results_table"]
    trial = {"drafter": "eagle3", "loss": "kl", "shards": "int8"}
    rows = table([{**trial, "tokens_per_step": 2.0}, {**trial, "tokens_per_step": 2.5}]).splitlines()
    assert rows[2:] == ["| eagle3 | kl | int8 | 2.000, 2.500 |"]
