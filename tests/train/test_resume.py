"""Killed and resumed runs, and runs of two processes, against an unbroken run of one: in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.data.manifest import load_manifest, save_manifest
from outrider.data.types import DistilledExample
from outrider.models.hf_target import HFTarget
from outrider.train.tracking import read_records

from ..conftest import REPOSITORY
from .conftest import DRAFTER, TRAIN, Run, write_shards

SCRIPTS = Path(__file__).parent
STEPS = 5
# Micro batches of unequal label counts, records over several steps, and checkpoints at every one.
CONFIG = {**TRAIN, "steps": STEPS, "batch_size": 2, "gradient_accumulation": 2, "max_positions": 20, "log_every": 2}


def launch(command: list[str], timeout_seconds: float = 120) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
        cwd=REPOSITORY,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def records(folder: Path) -> list[dict[str, Any]]:
    lines = read_records(folder / "train" / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in ("seconds", "positions_per_second")} for line in lines]


def test_a_run_killed_at_any_moment_ends_with_the_bits_of_an_unbroken_one(
    tiny_target_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    drafter = {**DRAFTER, "kind": "dropout"}
    script = str(SCRIPTS / "kill_and_resume.py")
    report = json.loads(
        launch([script, str(tiny_target_dir), str(shards_dir), str(tmp_path), json.dumps(CONFIG), json.dumps(drafter)])
    )
    assert len(report) == 9
    unbroken = tmp_path / "unbroken"
    expected = records(unbroken)
    assert [record["step"] for record in expected] == [2, 4, 5]
    for moment, outcome in report.items():
        assert records(tmp_path / moment) == expected, moment
        weights = (tmp_path / moment / "drafter" / "model.safetensors").read_bytes()
        assert weights == (unbroken / "drafter" / "model.safetensors").read_bytes(), moment
        assert outcome["losses"] == 2 * (STEPS - outcome["checkpoint"]), f"{moment}: steps were made again"
        left = sorted(path.name for path in (tmp_path / moment / "train" / "checkpoints").iterdir())
        assert left == ["step-00000004", "step-00000005"], moment
        assert sorted(path.name for path in (tmp_path / moment).iterdir()) == ["drafter", "train"], moment
    # What a kill may cost is the step in flight.
    assert {moment: outcome["checkpoint"] for moment, outcome in report.items()} == {
        "before the first checkpoint": 0,
        "in the middle of a step": 2,
        "between a record and its checkpoint": 2,
        "in a half-written checkpoint": 2,
        "before a checkpoint gets its name": 2,
        "before old checkpoints are removed": 3,
        "after the last step": 5,
        "with half a drafter": 5,
        "before the summary": 5,
    }


@pytest.fixture
def short_shards_dir(target: HFTarget, examples: list[DistilledExample], tmp_path: Path) -> Path:
    """Labels of two tokens, so that a single one is drafted."""
    cut = [replace(example, continuations=example.continuations[:, :2].clone()) for example in examples]
    directory = write_shards(tmp_path / "short", target.identity, cut)
    save_manifest(directory, replace(load_manifest(directory), horizon=2))
    return directory


def test_two_processes_train_as_one_with_the_same_texts_per_step(
    tiny_target_dir: Path, shards_dir: Path, short_shards_dir: Path, tmp_path: Path, run_train: Callable[..., Run]
) -> None:
    validation = {"validation_texts": 5, "validation_tokens": 8}
    config = {**TRAIN, **validation, "batch_size": 2, "gradient_accumulation": 2, "weight_decay": 0.1}
    trainings: dict[str, Any] = {
        "redrafter": {"drafter": DRAFTER, "shards": shards_dir},
        # Its recurrence gets no gradient, which DDP refuses unless it is told.
        "one depth": {"drafter": DRAFTER, "shards": short_shards_dir},
        "medusa": {"drafter": {"kind": "medusa", "num_heads": 3}, "shards": shards_dir},
        "eagle": {"drafter": {"kind": "eagle", "feature_noise": 0.0}, "shards": shards_dir},
    }
    as_json = {name: {**each, "config": config, "shards": str(each["shards"])} for name, each in trainings.items()}
    command = ["-m", "accelerate.commands.launch", "--config_file", "conf/launch/cpu.yaml", "--main_process_port", "0"]
    folders = [str(tiny_target_dir), str(shards_dir), str(tmp_path / "two")]
    launch([*command, str(SCRIPTS / "launched_train.py"), *folders, json.dumps(as_json)])
    for name, training in trainings.items():
        of_one_process = {**config, "batch_size": 8, "gradient_accumulation": 1}
        one = run_train(name, shards=training["shards"], replace_drafter=training["drafter"], **of_one_process)
        ours, theirs = (
            load_file(folder / "model.safetensors") for folder in (tmp_path / "two" / name / "drafter", one.drafter_dir)
        )
        assert len(ours) >= 4
        for key in ours if name != "eagle" else ():  # its gradients begin at zero, and Adam scales their rounding up
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5)
        *pairs, measured = zip(records(tmp_path / "two" / name), records(tmp_path / name), strict=True)
        assert len(pairs) == TRAIN["steps"]
        for two_record, one_record in pairs:
            assert two_record["loss"] == pytest.approx(one_record["loss"], rel=1e-4)
            assert two_record["grad_norm"] == pytest.approx(one_record["grad_norm"], rel=1e-3)
            assert two_record["positions_seen"] == one_record["positions_seen"]
            assert two_record["tokens_seen"] == one_record["tokens_seen"]
        of_two, of_one = measured
        assert of_two["validation_tokens_per_step"] == pytest.approx(of_one["validation_tokens_per_step"])
        assert of_two["validation_loss"] == pytest.approx(of_one["validation_loss"], rel=1e-3)
