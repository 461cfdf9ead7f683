"""Script that compares training with a straightforward loop, which must have equal losses."""

import json
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_training.py"


def test_every_kind_of_drafter_has_the_losses_of_a_straightforward_loop(
    demo_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "training.json"
    sizes = ["--texts", 4, "--max-length", 96, "--batch-size", 2, "--positions", 24, "--steps", 1, "--padding-texts", 4]
    monkeypatch.chdir(demo_target_dir.parents[1])
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, sizes), "--folder", str(tmp_path), "--output", str(output)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    report = json.loads(output.read_text())
    assert [case["kind"] for case in report["cases"]] == ["redrafter", "medusa", "eagle", "eagle3"]
    for case in report["cases"]:
        plain = case["losses"]["straightforward"]
        assert len(case["losses"]) == 4
        assert plain[0] != plain[1]
        for losses in case["losses"].values():
            assert losses == pytest.approx(plain, rel=1e-3)
        assert all(rate > 0 for rates in case["rates"].values() for rate in rates.values())
    for shares in report["padding"].values():
        assert shares["to the maximum"] >= shares["to the longest"] >= shares["packed"]
