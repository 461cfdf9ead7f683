"""The table of the loss study."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Run

SCRIPT = Path(__file__).parents[2] / "scripts" / "loss_study_table.py"


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.slow
def test_seeds_are_averaged_and_the_best_loss_comes_first(
    run_train: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = {"cross_entropy": 0.1, "tv": 0.9}
    for name, loss, steps in (("cross_entropy", "cross_entropy", 40), ("mixture", mixture, 1)):
        for seed in range(2):
            run_train(f"variants/{name}_{seed}", loss=loss, steps=steps, seed=seed, validation_texts=4, validation_tokens=8)
    capsys.readouterr()
    run_script(monkeypatch, tmp_path, "--output", tmp_path / "record.json")
    _, _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("| cross_entropy | all | 2 |")
    assert second.startswith("| 0.1 cross_entropy + 0.9 tv | all | 2 |")
    record = json.loads((tmp_path / "record.json").read_text())
    values = [figure["tokens_per_step"] for figure in record["figures"] if figure["loss"] != "cross_entropy"]
    assert f"| {sum(values) / 2:.3f} |" in second
    assert [figure["seed"] for figure in record["figures"]] == [0, 1, 0, 1]


def test_another_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="conf=loss_study_demo"):
        run_script(monkeypatch, tmp_path)
