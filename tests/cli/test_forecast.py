"""The forecast of a recipe on a tiny target: a page of output, and nothing of the recipe's own folder."""

import json
import time
from dataclasses import replace

import pytest
import torch

from outrider.cli import forecast
from outrider.cli.compose import forecast_command, load_recipe
from outrider.cli.forecast import FILE, FOLDER, Sample, data_of_sample, short_training
from outrider.data.config import DataConfig, DataSource
from outrider.data.shards import label_store
from outrider.eval.forecast import measure

SAMPLE = Sample(num_texts=10, of_texts=40, is_labelled=False)


@pytest.fixture
def overrides(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(forecast, "LEAST_LABELS", 40)
    monkeypatch.setattr(forecast, "LEAST_STEPS", 2)
    monkeypatch.setattr(forecast, "BATCH_SIZES", (1, 2))
    monkeypatch.setattr(forecast, "MOST_PROMPTS", 4)
    monkeypatch.setattr(measure, "TURNS", 1)
    more = ["data.limit=16", "distill.shard_examples=8", "train={steps: 16, batch_size: 4, max_positions: 64}"]
    return [*overrides, *more, "eval={temperatures: [0.0, 1.0], baselines: [suffix]}"]


def test_a_recipe_is_forecast_from_a_part_of_it(overrides, tmp_path, capsys):
    left = tmp_path / "run" / FOLDER / "labels" / "distill" / "shard-00000.json"  # of a killed forecast
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    forecast_command([*overrides, "eval.merge=[suffix]", "--minutes", "3"])
    # 1. The page.
    printed = capsys.readouterr().out
    assert max(map(len, printed[printed.index("How certain") :].splitlines()[:-3])) <= 80
    for title in (
        "How certain the target is (greedy)",
        "(temperature 1)",
        "Tokens per step by labels",
        "Milliseconds of a pass, one text at a time",
        "Milliseconds of a step",
    ):
        assert title in printed
    assert "2x the data about 0:0" in printed
    for line, temperature in zip(printed.splitlines()[-2:], (0, 1), strict=True):
        assert line.startswith((f"At temperature {temperature}: Train it", f"At temperature {temperature}: Don't train it"))
    # 2. The record, beside which nothing is left.
    folder = tmp_path / "run" / FOLDER
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == [FOLDER]
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []
    record = json.loads((folder / FILE).read_text())
    assert record["num_labels"] == sorted(record["num_labels"])
    assert record["num_labels"][0] < record["num_labels"][-1] <= record["total_labels"] * 1.3
    assert [*record["pass_seconds"]["64"]] == ["1", "8", "32"]
    trained = [one for one in record["forecasts"] if len(one["measured"]) == 3]
    merged, alone = ([one for one in trained if ("Suffix" in one["label"]) is is_merged] for is_merged in (True, False))
    assert {(one["temperature"], *one["speedup"]) for one in alone} == {(0.0, "1", "2"), (1.0, "1", "2")}
    assert {(one["temperature"], *one["speedup"]) for one in merged} == {
        (0.0, "1"),
        (1.0, "1"),
    }  # its drafts depend on the batch
    assert {one["label"] for one in record["forecasts"] if len(one["measured"]) == 1} == {"Suffix, 24 nodes"}


def test_labels_of_the_recipe_are_used_and_stay(overrides, tmp_path, monkeypatch, capsys, caplog):
    from outrider.cli.compose import run_command

    run_command([*overrides, "stages=[distill]"])
    before = label_store(tmp_path / "run" / "distill").load()
    for module in (forecast, measure):
        monkeypatch.setattr(module, "PACED_SHARE", 1e9)
    forecast_command([*overrides, "eval.merge=[suffix]"])
    printed = capsys.readouterr().out
    assert "distill: finished" in printed
    assert "not forecast, since answers of one prompt after another take too long" in caplog.text
    assert label_store(tmp_path / "run" / "distill").load() == before
    record = json.loads((tmp_path / "run" / FOLDER / FILE).read_text())
    assert not any(" + " in one["label"] for one in record["forecasts"])
    assert record["num_prompts"] == forecast.LEAST_PROMPTS
    assert record["num_labels"][-1] <= before.num_labels
    assert set(record["seconds"]) == {"train"}
    assert record["total_labels"] == before.num_labels


def test_too_little_time_is_an_error_that_names_the_time_that_is_enough(overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "LEAST_LABELS", 10**6)
    with pytest.raises(ValueError, match=r"too few .* for a forecast from parts of them, which takes \d+; run it"):
        forecast_command(overrides)
    monkeypatch.setattr(forecast, "LEAST_LABELS", 40)
    with pytest.raises(ValueError, match="has 2 prompt.s., and a forecast from fewer than 4 can't be trusted"):
        forecast_command([*overrides, f"eval.suites=[{{name: mt_bench, path: {tmp_path / 'question.jsonl'}, limit: 2}}]"])
    monkeypatch.setattr(forecast, "LABELS_SHARE", 1e-6)
    with pytest.raises(ValueError, match=r"minutes is 1, in which 0 texts .* can't be trusted. Set --minutes \d+"):
        forecast_command([*overrides, "--minutes", "1"])
    assert not (tmp_path / "run" / FOLDER / FILE).exists()


def test_memory_that_runs_out_leaves_larger_batches_out(overrides, tmp_path, monkeypatch, capsys):
    timed = forecast.step_seconds

    def small_memory(*arguments, batch_size, **options):
        if batch_size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return timed(*arguments, batch_size=batch_size, **options)

    monkeypatch.setattr(forecast, "step_seconds", small_memory)
    forecast_command(overrides)
    assert "batch 2" not in capsys.readouterr().out
    record = json.loads((tmp_path / "run" / FOLDER / FILE).read_text())
    assert [*record["step_seconds"]] == ["1"]


@pytest.mark.parametrize("temperatures", [[0.0], [0.0, 1.0]])
def test_paced_drafters_are_left_out_only_if_the_time_is_too_short(temperatures):
    steps = {(label, temperature): [[]] * 3 for label in ("A", "A + suffix") for temperature in temperatures}
    paced, is_trained = {"A + suffix"}, {"A": True, "A + suffix": True}
    # Ten seconds by plain decoding, and three parts of half as many seconds.
    for left, expected in ((24, True), (26, False)):
        assert forecast.is_too_long(steps, paced, is_trained, 10.0, time.monotonic() + left) is expected
    assert not forecast.is_too_long(steps, paced, {"A + suffix": True}, 10.0, time.monotonic())
    assert not forecast.is_too_long(steps, set(), is_trained, 10.0, time.monotonic())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "minutes"),
        (["train.stepz=3"], "train.stepz"),
        (["--plan"], "plan"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(arguments, message):
    with pytest.raises(ValueError, match=message):
        forecast_command(["demo", *arguments])
    with pytest.raises(ValueError, match="no recipe is given"):
        forecast_command([])


def test_the_sample_has_a_share_of_each_source():
    own = DataConfig(source="self", count=400)
    assert data_of_sample(own, SAMPLE).count == 100
    both = DataConfig(sources=[DataSource(source="self", count=7), DataSource(source="messages", path="chats.jsonl")])
    part = data_of_sample(both, SAMPLE)
    assert [source.count for source in part.sources] == [2, None]
    assert part.limit == 10


def test_a_short_training_has_as_many_epochs_in_smaller_steps():
    config = replace(load_recipe("demo").train, steps=1000, warmup_steps=100, batch_size=8, max_positions=1024, tracker="wandb")
    short = short_training(config, 0.05)
    assert short.steps * short.batch_size == pytest.approx(0.05 * 1000 * 8)
    assert (short.batch_size, short.max_positions, short.warmup_steps, short.tracker) == (2, 256, 20, "none")
    assert short_training(replace(config, batch_size=1), 0.05).max_positions == 1024
    assert short_training(config, 1e-6).steps == 1
