"""The plan of a complete run on a tiny target: a line and its reasons for each stage that is left."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.cli import plan, samples
from outrider.cli.samples import FIRST_SIZE, REPEATS, batch_seconds, cut, grow, mean_tokens
from outrider.data.types import Example
from outrider.distill.config import DECODER_ROWS
from outrider.distill.regenerate.engine import Limits
from outrider.eval.measure.timing import Generation
from outrider.models.decoding.stopping import Finish
from outrider.models.decoding.types import Step
from outrider.train.setup import LossModule

from .conftest import NUM_PROMPTS, run_here


def titles(printed: str) -> list[str]:
    return re.findall(r"^(\w+): about", printed, re.MULTILINE)


def seconds_of(printed: str) -> int:
    found = re.search(r"Whole run: about (\d+):(\d+):(\d+)", printed)
    assert found is not None
    hours, minutes, seconds = map(int, found.groups())
    return hours * 3600 + minutes * 60 + seconds


# --- growing portions


@pytest.mark.parametrize(
    ("seconds_per_token", "sizes"),
    [
        (1.0, [16]),  # slow: the first portion ends the measurement
        (0.05, [16, 64]),  # another portion, four times as large, would end too late
        (0.001, [16, 64, 100, 100, 100, 100, 100]),  # fast: the whole, repeated
    ],
)
def test_portions_grow_while_the_clock_leaves_time(seconds_per_token, sizes, tiny_target, monkeypatch):
    now, asked = [0.0], list[int]()

    def step(size: int) -> int:
        asked.append(size)
        now[0] += size * seconds_per_token
        return size

    monkeypatch.setattr(samples, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    results = grow(step, 100, tiny_target)
    assert asked == sizes
    assert sizes[0] == FIRST_SIZE
    assert results == ([100] * REPEATS if sizes[-1] == 100 else sizes[-1:])


def test_a_part_of_a_text_is_around_the_start_of_its_answer() -> None:
    text = Example(id="a", input_ids=torch.arange(40), loss_mask=torch.arange(40) >= 20)
    part = cut(text, 10)
    assert part.input_ids.tolist() == [*range(14, 24)]
    assert part.wanted.sum() == 4
    assert cut(text, 100).input_ids.tolist() == [*range(40)]


def step_of(tokens: tuple[tuple[int, ...], ...], finishes: tuple[Finish | None, ...], *, is_prefill: bool = False) -> Step:
    rows = tuple(range(len(tokens)))
    counts = {"num_accepted": (0,) * len(rows), "num_nodes": 0}
    return Step(rows=rows, tokens=tokens, finishes=finishes, is_prefill=is_prefill, **counts)


def test_the_length_of_answers_counts_those_that_the_measurement_cut() -> None:
    def mean(num_tokens: int, num_ended: int) -> float:
        finishes = tuple(Finish.STOP_TOKEN if row < num_ended else None for row in range(2))
        steps = [step_of((tuple(range(num_tokens)), ()), finishes, is_prefill=True), *[step_of((), ())] * 9]
        times = {"prefill_seconds": 1.0, "decode_seconds": 9.0, "processor_seconds": 1.0}
        answers = Generation(steps=steps, num_graphs=0, **times)
        assert batch_seconds(answers, 5.0) == pytest.approx(1 + 4)
        return mean_tokens(answers, 200)

    assert mean(400, 0) == 200
    assert mean(64, 2) == pytest.approx(32, rel=0.01)
    assert 100 < mean(400, 2) < 200


# --- the plan


def test_a_plan_has_every_stage_and_writes_nothing(overrides, tmp_path, capsys):
    run_here(*overrides, "plan=true")
    printed = capsys.readouterr().out
    assert titles(printed) == ["labels", "train", "eval"]
    assert printed.splitlines()[-1].startswith("Whole run: about 0:0")
    assert "3 steps of" in printed
    assert ", 2 texts and" in printed
    assert "with 1 CPU thread(s)" in printed
    assert printed.index("labels: the target labels parts") < printed.index("labels: about"), "silent while it measures"
    assert not (tmp_path / "run").exists()


def test_the_planned_counts_are_those_of_the_run(overrides, tmp_path, capsys):
    run_here(*overrides, "plan=true", "stages=[distill]")
    printed = capsys.readouterr().out
    run_here(*overrides, "stages=[distill]")
    statistics = json.loads((tmp_path / "run" / "distill" / "stats.json").read_text())
    counts = f"of about {statistics['num_text_tokens']:,} tokens, {statistics['num_positions']:,} with a label"
    assert f"{statistics['num_examples']} texts {counts}" in printed


@pytest.mark.parametrize(("unit", "stage"), [("labels", "distill"), ("train", "train")])
def test_the_planned_time_agrees_with_the_stage(unit, stage, overrides, tmp_path, monkeypatch, capsys):
    """By a clock on which each token takes a second."""
    now, forward, label = [0.0], LossModule.forward, samples.label_shard

    def slow(module: Any, batch: Any, anchor: Any) -> Any:
        now[0] += 1.0 * int(batch.attention_mask.sum())
        return forward(module, batch, anchor)

    def slow_labels(*args: Any) -> Any:
        labelled, stats = label(*args)
        return labelled, samples.replace(stats, seconds=1.0 * stats.num_text_tokens + stats.num_branch_tokens)

    monkeypatch.setattr(LossModule, "forward", slow)
    monkeypatch.setattr(samples, "label_shard", slow_labels)
    monkeypatch.setattr(samples, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    changes = [*overrides, "train.gradient_accumulation=2"]
    if stage == "train":
        run_here(*changes, "stages=[distill]")
    capsys.readouterr()
    run_here(*changes, f"stages=[{stage}]", "plan=true")
    planned = seconds_of(capsys.readouterr().out)
    now[0] = 0.0
    run_here(*changes, f"stages=[{stage}]")
    if stage == "distill":
        statistics = json.loads((tmp_path / "run" / "distill" / "stats.json").read_text())
        now[0] = statistics["num_text_tokens"] + statistics["num_branch_tokens"]
    assert now[0] / 1.5 < planned < now[0] * 1.5, unit


@pytest.mark.parametrize(("engine", "rows"), [("decoder", DECODER_ROWS), ("batch", 3)])
def test_answers_are_planned_before_their_labels(engine, rows, overrides, capsys):
    distill = f"distill={{engine: {engine}, max_new_tokens: 24, shard_examples: 3}}"
    run_here(*overrides, "plan=true", "stages=[distill]", distill)
    printed = capsys.readouterr().out
    assert titles(printed) == ["answers", "labels"]
    assert re.search(rf"5 answers of about \d+ tokens, in batches of {rows}\n", printed)


@pytest.mark.parametrize("engine", ["null", "decoder"])
def test_the_window_is_for_the_texts_that_are_labelled(engine, overrides, monkeypatch):
    """Regenerated ones end where the window does."""
    asked: list[int] = []
    monkeypatch.setattr(plan, "answer_limits", lambda *args: Limits(max_new_tokens=8, max_tokens=50))
    monkeypatch.setattr(plan, "require_labels", lambda target, num_tokens, *args, **options: asked.append(num_tokens))
    run_here(*overrides, "plan=true", "stages=[distill]", f"distill.engine={engine}")
    assert asked == [96 if engine == "null" else 50]


def test_a_too_small_disk_and_a_long_run_are_shown(overrides, monkeypatch, capsys):
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 1)
    run_here(*overrides, "plan=true", "stages=[train]", "train.steps=1000000000")
    printed = capsys.readouterr().out
    assert "NOT ENOUGH" in printed
    assert "For a first try" in printed.splitlines()[-1]


def test_training_is_planned_without_shards_and_finished_stages_are_left_out(overrides, tmp_path, capsys):
    run_here(*overrides, "plan=true", "stages=[train]")
    assert titles(capsys.readouterr().out) == ["train"]
    run_here(*overrides, "stages=[distill,train]")
    capsys.readouterr()
    run_here(*overrides, "stages=[distill,train]", "plan=true")
    printed = capsys.readouterr().out
    assert titles(printed) == []
    assert [line.split(":")[0] for line in printed.splitlines() if ": finished in " in line] == ["distill", "train"]


def test_a_suite_that_cant_be_read_leaves_the_other_stages_planned(overrides, capsys, caplog):
    with caplog.at_level("WARNING", "outrider"):
        run_here(*overrides, "plan=true", "eval.suites=[{name: gsm8k}]")
    assert titles(capsys.readouterr().out) == ["labels", "train"]
    messages = [record.getMessage() for record in caplog.records if record.name == "outrider.cli.run"]
    (line,) = [message for message in messages if "the plan has no evaluation" in message]
    assert "eval.suites=[{name: NAME, path: FILE}]" in line


def test_the_evaluation_counts_all_answers(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["eval.batch_sizes=[1,3]", "eval.temperatures=[0.0,1.0]", "eval.repeats=2"]
    run_here(*overrides, "plan=true", "stages=[eval]", *changes)
    answers = NUM_PROMPTS * 2 * 6 * 2 * 2 * 2  # prompts, turns, methods, temperatures, sizes, repeats
    assert f"{answers} answers by 6 methods" in capsys.readouterr().out


def test_a_busy_machine_is_named(overrides, monkeypatch, capsys):
    changes = ["plan=true", "stages=[train]", "train.validation_texts=2", "train.validation_tokens=8"]
    monkeypatch.setattr("os.getloadavg", lambda: (100.0, 0.0, 0.0))
    run_here(*overrides, *changes)
    printed = capsys.readouterr().out
    assert "load 100.0" in printed
    assert "validation: about" in printed
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    run_here(*overrides, *changes)
    assert "load" not in capsys.readouterr().out
