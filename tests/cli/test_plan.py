"""The plan of a complete run on a tiny target.

It has a table for each remaining stage, is at most 80 columns wide and writes no file.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from outrider.cli.config import register, to_run_config
from outrider.cli.run import run
from outrider.eval import estimate as eval_estimate
from outrider.train import estimate as train_estimate
from outrider.train.setup import LossModule


@pytest.fixture
def overrides(tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(train_estimate, "MEASURED_SECONDS", 0.1)
    questions = tmp_path / "question.jsonl"
    turns = ["Write a line.", "Write it again."]
    questions.write_text("".join(json.dumps({"question_id": i, "category": "x", "turns": turns}) + "\n" for i in range(3)))
    return [
        f"output_dir={tmp_path / 'run'}",
        f"target.name_or_path={tiny_target_dir}",
        "num_threads=1",
        "data={limit: 5, max_length: 96, prompt_chars_min: 20, prompt_chars_max: 40}",
        "distill={horizon: 3, shard_examples: 2}",
        "drafter={exit_width: 16, num_blocks: 1, head_init: random}",
        "train={steps: 3, warmup_steps: 1, batch_size: 2, max_positions: 32, gradient_accumulation: 1}",
        f"eval.suites=[{{name: mt_bench, path: {questions}}}]",
        "eval={max_new_tokens: 12, profile_prompts: 1, memory_bandwidth_gbs: 10.0}",
        "eval.settings=[{beam_width: 2, beam_length: 3}]",
    ]


def run_here(*overrides: str) -> None:
    register()
    with initialize_config_module("outrider.conf", version_base="1.3"):
        composed = compose("config", overrides=list(overrides))
    run(to_run_config(composed))


def titles(printed: str) -> list[str]:
    return [line.strip() for line in printed.splitlines() if line.strip() in ("labels", "train", "eval", "export")]


def test_a_plan_has_a_table_for_every_stage_and_one_headline(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here("conf=demo", *overrides, "plan=true")
    printed = capsys.readouterr().out
    assert titles(printed) == ["labels", "train", "eval", "export"]
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.splitlines()[-1].startswith("Whole run: about 0:0")
    assert "3 of 2 texts" in printed
    assert "with 1 CPU thread(s)" in printed
    assert not (tmp_path / "run").exists()


def test_the_planned_time_of_training_agrees_with_the_training(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock on which each micro-batch takes 20 seconds."""
    now, forward = [0.0], LossModule.forward

    def slow(*args: Any) -> Any:
        now[0] += 20.0
        return forward(*args)

    monkeypatch.setattr(LossModule, "forward", slow)
    monkeypatch.setattr(train_estimate, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    changes = ["conf=demo", *overrides, "train.gradient_accumulation=2"]
    run_here(*changes, "stages=[distill]")
    capsys.readouterr()
    run_here(*changes, "stages=[train]", "plan=true")
    found = re.search(r"Whole run: about (\d+):(\d+):(\d+)", capsys.readouterr().out)
    assert found is not None
    hours, minutes, seconds = map(int, found.groups())
    now[0] = 0.0
    run_here(*changes, "stages=[train]")
    assert now[0] == 3 * 2 * 20.0
    assert now[0] / 5 < hours * 3600 + minutes * 60 + seconds < now[0] * 5


def test_training_is_planned_without_shards_and_finished_stages_are_left_out(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here("conf=demo", *overrides, "plan=true", "stages=[train]")
    assert titles(capsys.readouterr().out) == ["train"]
    run_here("conf=demo", *overrides, "stages=[distill,train]")
    capsys.readouterr()
    run_here("conf=demo", *overrides, "stages=[distill,train]", "plan=true")
    printed = capsys.readouterr().out
    assert titles(printed) == []
    assert [line.split(":")[0] for line in printed.splitlines() if ": finished in " in line] == ["distill", "train"]


def test_a_suite_that_cant_be_read_leaves_the_other_stages_planned(
    overrides: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "outrider"):
        run_here("conf=demo", *overrides, "plan=true", "eval.suites=[{name: gsm8k}]")
    assert titles(capsys.readouterr().out) == ["labels", "train", "export"]
    messages = [record.getMessage() for record in caplog.records if record.name == "outrider.cli.run"]
    (line,) = [message for message in messages if "the plan has no evaluation" in message]
    assert "eval.suites=[{name: gsm8k, path: FILE}]" in line


def test_the_evaluation_counts_all_answers(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert eval_estimate.MEASURED_TOKENS > eval_estimate.WARMUP_TOKENS
    changes = ["eval.batch_sizes=[1,3]", "eval.temperatures=[0.0,1.0]", "eval.repeats=2"]
    run_here("conf=demo", *overrides, "plan=true", "stages=[eval]", *changes)
    answers = 3 * 2 * 5 * 2 * 2 * 2  # prompts, turns, methods, temperatures, sizes, repeats
    assert f"{answers}: 3 prompts x 5 methods" in capsys.readouterr().out


def test_a_busy_machine_is_named(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["plan=true", "stages=[train]", "train.validation_texts=2", "train.validation_tokens=8"]
    monkeypatch.setattr("os.getloadavg", lambda: (100.0, 0.0, 0.0))
    run_here("conf=demo", *overrides, *changes)
    printed = capsys.readouterr().out
    assert "load 100.0" in printed
    assert "validation " in printed
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    run_here("conf=demo", *overrides, *changes)
    assert "load" not in capsys.readouterr().out
