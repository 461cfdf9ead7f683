"""scripts/sampling_study.py on a tiny target: all cells, a resume, the page's tables, bad input."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("sampling_study")


@pytest.mark.slow
def test_every_tree_and_every_kind_of_labels_is_measured_and_a_killed_study_resumes(
    study: Any, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "study"
    args = study.parse_args(["--tiny", "--target", str(tiny_target_dir), "--output", str(output), "--threads", "1"])
    decode, decoded = study.decode, []

    def killed_once(*arguments: Any, **named: Any) -> Any:
        decoded.append(arguments)
        if len(decoded) == 3:
            raise KeyboardInterrupt
        return decode(*arguments, **named)

    monkeypatch.setattr(study, "decode", killed_once)
    with pytest.raises(KeyboardInterrupt):
        study.run(args)
    study.run(args)
    num_trees = 3 * 2 * (1 + len(study.WIDTHS))
    num_labels = 4 * 2 * len(study.TINY["seeds"])
    assert len(decoded) == num_trees + num_labels + 1, "finished cells were decoded again"
    record = json.loads((output / "sampling_study.json").read_text())
    assert {row["kind"] for row in record["trees"]} == set(study.KINDS)
    assert len(record["trees"]) == num_trees
    assert [row["labels"] for row in record["labels"][::2]] == ["greedy", "greedy, kl", "sampled at 0.7", "sampled at 1"]
    for row in [*record["trees"], *record["labels"]]:
        assert 1 <= row["tokens_per_step"] <= study.DEPTH + 1
        assert row["temperature"] in (0.7, 1.0)
    assert all(row["ratio"] == 1 for row in record["trees"] if row["tree"] == "deterministic")
    assert all(len(row["by_seed"]) == 2 for row in record["labels"])
    # The page has a row for each tree and size, and for each kind of labels.
    page = importlib.import_module("benchmarks_page.sampling")
    records = SimpleNamespace(read=lambda name: record)
    assert page.drawn_trees(records, "").count("\n| ") == 1 + 3 * (1 + len(study.WIDTHS))
    assert page.sampled_labels(records, "").count("\n| ") == 1 + 4
    with pytest.raises(ValueError, match=r"steps.*--output"):
        study.run(study.parse_args(["--target", str(tiny_target_dir), "--output", str(output)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "0"], "--prompts is 0"),
        (["--temperatures", "0", "1"], "temperatures above 0"),
        (["--nodes", "3"], "a group of 4"),
    ],
)
def test_wrong_options_are_refused_before_any_work(study: Any, tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study.run(study.parse_args([*options, "--output", str(tmp_path / "study")]))
    assert not (tmp_path / "study").exists()
