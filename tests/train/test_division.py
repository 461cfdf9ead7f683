"""Division of a step's texts among processes and micro-batches."""

import logging

import pytest

from outrider.train.config import TrainConfig, with_accumulation

from .resumed import records


@pytest.mark.parametrize(("num_processes", "accumulation"), [(1, 32), (2, 16), (8, 4), (32, 1)])
def test_the_accumulation_follows_for_any_number_of_processes(num_processes: int, accumulation: int) -> None:
    config = with_accumulation(TrainConfig(steps=10, batch_size=4, global_batch_size=128), num_processes)
    assert config == TrainConfig(steps=10, batch_size=4, gradient_accumulation=accumulation)


def test_options_without_a_global_batch_size_stay() -> None:
    config = TrainConfig(steps=10, batch_size=4, gradient_accumulation=3)
    assert with_accumulation(config, 5) is config


@pytest.mark.parametrize(
    ("batch_size", "num_processes", "texts", "remedy"),
    [
        (4, 3, 128, "global_batch_size=120 or 132"),
        (4, 8, 16, "global_batch_size=32, or train.batch_size=2"),
        (6, 8, 128, "global_batch_size=96 or 144, or train.batch_size=4"),
    ],
)
def test_an_indivisible_global_batch_size_is_an_error_with_the_nearest_one(batch_size, num_processes, texts, remedy):
    config = TrainConfig(steps=10, batch_size=batch_size, global_batch_size=texts)
    factors = f"train.batch_size {batch_size} x {num_processes} processes"
    with pytest.raises(ValueError, match=f"global_batch_size is {texts}, .*{factors}.*; set train.{remedy}$"):
        with_accumulation(config, num_processes)


def test_a_training_logs_the_texts_of_a_step_and_learns_the_same_of_them(run_train, caplog):
    caplog.set_level(logging.INFO, "outrider.train")
    by_hand = run_train("by_hand", batch_size=2, gradient_accumulation=3, max_positions=8)
    followed = run_train("followed", batch_size=2, global_batch_size=6, max_positions=8)
    assert records(followed.train_dir.parent) == records(by_hand.train_dir.parent)
    lines = [record.message for record in caplog.records if record.message.startswith("a step reads")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert "6 texts = 1 process x train.batch_size 2 x gradient_accumulation 3: about" in lines[0]
    assert "24 positions (at most 24, by train.max_positions 8); 6 steps are 1.64 epochs of 22 texts" in lines[0]
