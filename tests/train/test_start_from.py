"""Training that starts from a trained drafter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from outrider.models.drafters.saved.folder import record_weights
from outrider.train.records import read_records

from .conftest import Run

RunTrain = Callable[..., Run]


def start_from(run: Run) -> dict[str, Any]:
    return {"start_from": str(run.drafter_dir)}


def first_loss(run: Run) -> float:
    return float(read_records(run.train_dir / "metrics.jsonl")[0]["loss"])


def test_training_starts_from_the_given_weights_and_not_from_fresh_ones(run_train: RunTrain) -> None:
    before = run_train("before", steps=30)
    warm = run_train("warm", replace_drafter=start_from(before), steps=1, learning_rate=1e-12)
    weights, start = (load_file(run.drafter_dir / "model.safetensors") for run in (warm, before))
    assert all(tensor.allclose(start[name], atol=1e-9) for name, tensor in weights.items())
    assert first_loss(warm) < 0.8 * first_loss(before)


@pytest.mark.slow
def test_a_folder_of_another_start_is_refused(run_train: RunTrain) -> None:
    first, second = run_train("first", seed=1), run_train("second", seed=2)
    warm = run_train("warm", replace_drafter=start_from(first))
    assert "started_from" in json.loads((warm.train_dir / "summary.json").read_text())["run"]
    with pytest.raises(ValueError, match=r"drafter\.start_from .* has other weights"):
        run_train("warm", replace_drafter=start_from(second))
    with pytest.raises(ValueError, match=r"drafter\.start_from .* is set in one run alone"):
        run_train("warm")


@pytest.mark.slow
def test_a_moved_starting_drafter_counts_as_the_same(run_train: RunTrain, tmp_path: Path) -> None:
    before = run_train("before")
    warm = run_train("warm", replace_drafter=start_from(before))
    trained_at = (warm.drafter_dir / "model.safetensors").stat().st_mtime_ns
    moved = before.drafter_dir.rename(tmp_path / "elsewhere")
    run_train("warm", replace_drafter={"start_from": str(moved)})
    assert (warm.drafter_dir / "model.safetensors").stat().st_mtime_ns == trained_at, "it was there already"


@pytest.mark.slow
def test_labels_of_new_data_do_not_change_the_draft_vocabulary(run_train: RunTrain) -> None:
    """With another vocabulary, every row of the head would belong to another token."""
    before = run_train("before", drafter={"draft_vocab_size": 40})
    path = before.drafter_dir / "model.safetensors"
    weights = load_file(path)
    # like a vocabulary from other data
    tokens = weights["draft_tokens"].flip(0).neg() + weights["draft_tokens"].max()
    save_file({**weights, "draft_tokens": tokens}, path)
    record_weights(before.drafter_dir)
    warm = run_train("warm", replace_drafter=start_from(before))
    assert load_file(warm.drafter_dir / "model.safetensors")["draft_tokens"].equal(tokens)
