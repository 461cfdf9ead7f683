"""Where records go."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.train.config import TrainConfig
from outrider.train.tracking import Tracker, read_records

from .conftest import no_file_above


def write(directory: Path, *steps: int, resume: int = 0, **options: Any) -> list[int]:
    directory.mkdir(exist_ok=True)
    with Tracker(directory, TrainConfig(steps=9, **options), {"seed": 0}, step=resume, active=True) as tracker:
        for step in steps:
            tracker.log({"step": step, "loss": 1 / step, "accuracy_by_depth": [[0.5, None], [0.25, 0.75]], "sums": [1.0, None]})
    return [record["step"] for record in read_records(directory / "metrics.jsonl")]


def test_a_resumed_run_repeats_no_record_and_drops_a_line_cut_by_a_kill(tmp_path: Path) -> None:
    assert write(tmp_path, 1, 2, 3) == [1, 2, 3]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert write(tmp_path, 3, 4, resume=2) == [1, 2, 3, 4]


def test_a_run_from_the_start_begins_a_new_file(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    assert write(tmp_path, 1) == [1]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    with Tracker(tmp_path, TrainConfig(steps=1, tracker="wandb"), {}, step=0, active=False) as tracker:
        tracker.log({"step": 1})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    with (
        no_file_above(300),
        pytest.raises(OSError, match=r"record of step 3 could not be written to .*Complete checkpoints are kept"),
    ):
        write(tmp_path, 1, 2, 3)


def test_wandb_is_not_imported_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    assert write(tmp_path, 1) == [1]
    with pytest.raises(ImportError):
        write(tmp_path, 1, tracker="wandb")


def test_wandb_gets_flat_numbers_and_one_run_for_all_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, logged, finished = [], [], []

    def init(**options: Any) -> Any:
        started.append(options)
        return SimpleNamespace(
            log=lambda scalars, step: logged.append((step, scalars)), finish=lambda exit_code: finished.append(exit_code)
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    write(tmp_path, 1, tracker="wandb", project="drafters")
    with pytest.raises(ZeroDivisionError):
        write(tmp_path, 2, 0, resume=1, tracker="wandb")
    assert [options["id"] for options in started] == [started[0]["id"]] * 2
    assert started[0]["project"] == "drafters"
    assert started[0]["config"] == {"seed": 0}
    assert finished == [0, 1]
    assert logged[0] == (
        1,
        {
            "step": 1,
            "loss": 1.0,
            "accuracy_by_depth/depth0_top1": 0.5,
            "accuracy_by_depth/depth1_top1": 0.25,
            "accuracy_by_depth/depth1_top2": 0.75,
            "sums/depth0": 1.0,
        },
    )


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_real_wandb_works_without_a_network(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE")
    assert write(tmp_path, 1, 2, tracker="wandb", wandb_mode=mode) == [1, 2]
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == (1 if mode == "offline" else 0)
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
