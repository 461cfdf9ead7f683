"""outrider's half of each check by another program: exports and results of every case."""

import pytest
import torch

from .conftest import SCRIPTS

CHECKS = sorted(path.stem for path in SCRIPTS.glob("engines/check_*.py") if path.stem != "check_transformers")


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_makes_what_the_other_program_compares(name, script, tmp_path):
    assert script(f"engines/{name}").make(tmp_path)
    assert (tmp_path / "target" / "config.json").is_file()
    results = [torch.load(path, weights_only=True) for path in tmp_path.glob("*/results.pt")]
    assert bool(results) == (name != "check_modelopt"), "the Model Optimizer reads no drafters of ours"


def test_every_check_is_tested() -> None:
    assert len(CHECKS) == 8


def test_logits_are_compared_up_to_rounding(script, monkeypatch):
    targets = script("engines/engine_targets")
    logits = [torch.tensor([4.0, -8.0]), torch.tensor([1.0, 2.0])]
    assert targets.compare("equal", [logits[0] + 1e-6, logits[1]], logits)
    assert not targets.compare("other", [logits[0] + 1e-3, logits[1]], logits)
    monkeypatch.setattr("sys.argv", ["check_x.py", "no_such_step", "folder"])
    with pytest.raises(SystemExit, match="usage: check_x.py make DIRECTORY"):
        targets.run("What it checks.", {"make": lambda _: True})
