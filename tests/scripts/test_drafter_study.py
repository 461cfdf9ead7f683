"""scripts/drafter_study.py on a tiny target: all cells, a resume, the report; its figures and marks by hand."""

import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("drafter_study")


@pytest.fixture
def cells(study: Any) -> Any:
    return importlib.import_module("drafter_cells")


@pytest.fixture
def reports(study: Any) -> Any:
    return importlib.import_module("drafter_study_report")


@pytest.mark.slow
def test_every_drafter_is_trained_and_decodes_and_a_killed_study_resumes(
    study: Any, cells: Any, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, record = tmp_path / "study", tmp_path / "record"
    options = ["--tiny", "--target", str(tiny_target_dir), "--output", str(output)]
    args = study.parse_args([*options, "--record", str(record)])
    # Two learning rates are enough: most of the recipes have one of them, and share its trainings.
    monkeypatch.setattr(cells, "RATE_VALUES", cells.RATE_VALUES[1:3])
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
    expected = study.chosen_cells(cells.PARTS, list(cells.VARIANTS), args)
    assert len({cell.training for cell in expected}) < len(expected), "the rates share no training with the other parts"
    assert len(decoded) == len(expected) + 1, "finished cells were decoded again, or some weren't decoded"
    names = {path.name for path in record.iterdir()}
    assert names == {"drafter_study.json", "table.md", "label_curves.png", "settings.json", "cells"}
    report = json.loads((record / "drafter_study.json").read_text())
    assert {row["drafter"] for row in report["rows"]} == set(cells.VARIANTS)
    shutil.rmtree(output)
    study.run(args)
    assert len(decoded) == len(expected) + 1, "the record's cells were measured again"
    assert {row["drafter"] for row in report["rows"] if row["change"] == "dpace"} == {"redrafter", "block", "eagle3"}
    assert all(1 <= row["tokens_per_step"] <= 6 for row in report["rows"])
    with pytest.raises(ValueError, match=r"texts.*--output"):
        study.run(study.parse_args(["--target", str(tiny_target_dir), "--output", str(output)]))
    with pytest.raises(ValueError, match=r"texts.*--record"):
        study.run(study.parse_args(["--target", str(tiny_target_dir), "--output", str(tmp_path), "--record", str(record)]))


def test_each_cell_has_a_name_of_its_own_and_a_recipe(study: Any, cells: Any) -> None:
    args = study.parse_args(["--target", "models/demo_target"])
    chosen = study.chosen_cells(cells.PARTS, list(cells.VARIANTS), args)
    assert len({cell.name for cell in chosen}) == len(chosen)
    rates = {cell.rate for cell in chosen if cell.part == cells.RATES}
    assert rates == set(cells.RATE_VALUES)
    assert {cell.rate for cell in chosen} <= rates, "a recipe has a rate that wasn't compared"
    assert {cell.variant for cell in chosen} == set(cells.VARIANTS)
    labels = set()
    for cell in {cell.variant: cell for cell in chosen}.values():
        config = study.recipe(cell, args)
        assert config.train.steps * config.train.max_positions == cell.size.labels
        assert config.train.learning_rate == cell.rate
        labels.add((config.distill.horizon, config.distill.features, tuple(config.distill.feature_layers), config.data.limit))
    assert len(labels) == 1, "the drafters would be trained on different labels"


def test_a_plan_estimates_from_finished_cells_of_the_same_drafter(
    study: Any, cells: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = study.parse_args(["--plan", "--parts", "full", "--seeds", "0", "1", "--output", str(tmp_path)])
    done = study.chosen_cells(["full"], ["block"], args)[0]
    figures = {"sums": [[1, 1]], "parameters": 1, "seconds": {"training": 600.0, "decoding": 60.0}}
    study.path_of(done, args).parent.mkdir(parents=True)
    study.path_of(done, args).write_text(json.dumps(figures))
    study.run(args)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{2 * 6} cells, 1 of them done"
    assert f"  {done.name.removesuffix('0')}1: about 11.0 min" in lines
    assert lines[-1] == "about 11 min for the cells with an estimate"
    assert not (tmp_path / "settings.json").exists(), "a plan measured something"


def all_cells(cells: Any, seeds: list[int]) -> list[Any]:
    rates = dict.fromkeys(cells.VARIANTS, 8e-3)
    options = {"rates": rates, "seeds": seeds, "curve_seeds": seeds, "sizes": cells.SIZES}
    found: list[Any] = cells.cells_of(cells.PARTS, list(cells.VARIANTS), **options)
    return found


def measured(cells: Any, sizes: dict[str, Any]) -> dict[Any, Any]:
    """Return figures of two prompts: drafter and seed -> tokens of each prompt in ten steps."""
    figures = {}
    for (part, name, seed), tokens in sizes.items():
        cell = cells.Cell(part=part, variant=name, size=cells.SIZES[part][0], seed=seed, rate=8e-3)
        figures[cell] = {"sums": [[count, 10] for count in tokens], "parameters": 7}
    return figures


def test_ratios_compare_the_seeds_that_both_sides_have(cells: Any, reports: Any) -> None:
    figures = measured(
        cells,
        {
            ("full", "redrafter", 0): (20, 20),
            ("full", "redrafter", 1): (30, 30),
            ("full", "block", 0): (22, 22),
            ("equal", "eagle3", 0): (20, 40),
            ("weights", "eagle3", 0): (30, 60),
        },
    )
    rows = {(row["drafter"], row["change"]): row for row in reports.rows_of(figures)}
    assert rows["redrafter", "uniform"]["tokens_per_step"] == 2.5
    assert rows["redrafter", "uniform"]["by_seed"] == [2.0, 3.0]
    over = rows["block", "uniform"]["over_reference"]
    assert over["seeds"] == [0]
    assert over["ratio"] == pytest.approx(1.1), "seed 1 of the reference counted"
    assert over["interval"] == pytest.approx((1.1, 1.1)), "prompts weren't paired"
    assert rows["eagle3", "uniform"]["over_reference"] is None
    assert rows["eagle3", "dpace"]["over_uniform"]["ratio"] == pytest.approx(1.5)
    assert rows["eagle3", "dpace"]["over_uniform"]["interval"] == pytest.approx((1.5, 1.5))
    low, high = rows["eagle3", "dpace"]["interval"]
    assert low < 4.5 < high


def test_rates_are_compared_apart_from_all_other_figures(cells: Any, reports: Any) -> None:
    figures = {}
    for cell in all_cells(cells, [0, 1]):
        tokens = 90 if cell.part == cells.RATES else 20
        figures[cell] = {"sums": [[tokens + 1000 * cell.rate + cell.seed, 10]], "parameters": 7}
    rows = reports.rate_rows({cell: values for cell, values in figures.items() if cell.part == cells.RATES})
    row = next(row for row in rows if row["drafter"] == "block" and row["labels"] == cells.ALL.labels)
    assert row["by_rate"] == {"0.002": 9.25, "0.004": 9.45, "0.008": 9.85, "0.016": 10.65}
    assert "| block, rnn | 512,000 | 9.25 | 9.45 | 9.85 | 10.65 |" in reports.rates_table(rows)


def test_no_other_figure_is_of_a_prompt_that_chose_the_rates(study: Any, demo_target_dir: Path) -> None:
    trainings = importlib.import_module("study_trainings")
    target = load_target(TargetConfig(name_or_path=str(demo_target_dir)), torch.device("cpu"))
    prompts, others = (
        {tuple(prompt.tolist()) for prompt in trainings.held_out_prompts(target, limit=30, new_tokens=16, others=which)}
        for which in (False, True)
    )
    assert (len(prompts), len(others)) == (30, 30)
    assert not prompts & others
    with pytest.raises(ValueError, match=r"--prompts is 100000.*give fewer"):
        trainings.held_out_prompts(target, limit=100_000, new_tokens=16, others=True)


def test_marks_judge_the_best_challenger(cells: Any, reports: Any) -> None:
    rows = reports.rows_of(
        measured(
            cells,
            {
                ("full", "redrafter", 0): (25, 25),
                ("full", "block", 0): (27, 27),
                ("full", "block", 1): (40, 40),
                ("full", "eagle3", 0): (26, 26),
                ("full", "draft_model", 0): (30, 30),
                ("equal", "redrafter", 0): (23, 23),
                ("equal", "block", 0): (23, 23),
            },
        )
    )
    marks = reports.judge(rows)
    assert marks[-1]["text"].endswith("NOT reached, 0.90 [0.90, 0.90], by seed 0.90."), "seeds that only one side has"
    verdicts = {mark["rule"]: mark["reached"] for mark in marks}
    assert verdicts == {
        "block, rnn at least 2.33 with 57,600 labels": False,
        "block, rnn at least 1.08 of ReDrafter's tokens per step with 512,000 labels": True,
        "block, rnn at least EAGLE-3's tokens per step with 512,000 labels": True,
        "block, rnn at least draft model's tokens per step with 512,000 labels": False,
    }


def test_the_table_is_at_most_80_columns_wide_and_the_page_shows_it(cells: Any, reports: Any, tmp_path: Path) -> None:
    figures = {}
    for cell in all_cells(cells, [0, 1, 2]):
        figures[cell] = {"sums": [[20 + cell.seed, 10], [31, 11]], "parameters": 7}
    reports.write_report(figures, len(figures) + 1, {}, tmp_path)
    table = (tmp_path / "table.md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) > 20
    assert max(map(len, lines)) <= 80
    assert f"{len(figures)} of {len(figures) + 1} cells were measured so far." in table
    page = importlib.import_module("benchmarks_page.printed")
    record = json.loads((tmp_path / "drafter_study.json").read_text())
    assert page.printed_tables(SimpleNamespace(read=lambda name: record), "") == table.split("\n\n- ")[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "0"], "--prompts is 0"),
        (["--seeds", "1", "1"], "--seeds has a seed twice"),
        (["--parts", "weights", "--variants", "medusa"], "no part of weights measures medusa"),
    ],
)
def test_wrong_options_are_refused_before_any_work(study: Any, tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study.run(study.parse_args([*options, "--output", str(tmp_path / "study")]))
    assert not (tmp_path / "study").exists()
