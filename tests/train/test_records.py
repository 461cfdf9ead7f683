"""Records of training in files, on the bar, in Weights & Biases and TensorBoard."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState

from outrider.train import records as records_module
from outrider.train.config import TrainConfig
from outrider.train.records import Tracker, progress_bar, read_records, require_tracker, show

from .conftest import no_file_above


def write(directory: Path, *steps: int, resume: int = 0, **options: Any) -> list[int]:
    directory.mkdir(exist_ok=True)
    PartialState(cpu=True)  # accelerate's trackers ask it which process is the main one
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


DAMAGED_LINES = (b"{", b'[["step", 1]]', b"{}", b'{"step": "1"}', b'{"step": 1, "loss": NaN}', b'{"step": "\xff"}')


@pytest.mark.parametrize("line", [*DAMAGED_LINES, b"[" * 10**5], ids=range(7))
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    write(tmp_path, 1)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not a record .*; delete the line"):
        write(tmp_path, 2, resume=1)


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


def test_wandb_receives_flat_numbers_in_one_run_for_all_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, logged, finished = [], [], []

    def init(**options: Any) -> Any:
        started.append(options)
        return SimpleNamespace(log=lambda scalars, step: logged.append((step, scalars)), finish=lambda: finished.append(None))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setenv("WANDB_PROJECT", "drafters")
    write(tmp_path, 1, tracker="wandb")
    with pytest.raises(ZeroDivisionError):
        write(tmp_path, 2, 0, resume=1, tracker="wandb")
    assert [options["id"] for options in started] == [started[0]["id"]] * 2
    assert started[0]["project"] == "drafters"
    assert started[0]["config"] == {"seed": 0}
    assert finished == [None], "wandb marks the second run as failed when its process ends"
    assert logged[0] == (
        1,
        {
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
    monkeypatch.setenv("WANDB_MODE", mode)
    assert write(tmp_path, 1, 2, tracker="wandb") == [1, 2]
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == (1 if mode == "offline" else 0)
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's events: steps and values by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory / "tensorboard"))
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in accumulator.Scalars(name)] for name in names}


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, tracker="tensorboard")
    # TensorBoard reads event files in the order of their names, which contain the second.
    time.sleep(1.1)
    write(tmp_path, 3, 4, resume=2, tracker="tensorboard")
    shown = events(tmp_path)
    assert [step for step, _ in shown["loss"]] == [1, 2, 3, 4]
    assert shown["loss"][1][1] == 0.5
    assert [value for _, value in shown["accuracy_by_depth/depth1_top2"]] == [0.75] * 4
    assert "step" not in shown


def test_a_tracker_without_its_package_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(steps=1, tracker="wandb+tensorboard")
    require_tracker(config)
    find_spec = records_module.importlib.util.find_spec
    monkeypatch.setattr(
        records_module.importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name)
    )
    with pytest.raises(ValueError, match=r"the package tensorboard isn't installed; pip install 'outrider\[tensorboard\]'"):
        require_tracker(config)
    require_tracker(TrainConfig(steps=1, tracker="wandb"))


@pytest.mark.parametrize("fails_in", ["log", "finish"])
def test_a_failing_tracker_is_one_warning_and_records_continue(tmp_path, monkeypatch, caplog, fails_in):
    calls: list[int] = []

    class Unreachable:
        def __init__(self, *_: Any) -> None: ...

        def log(self, scalars: Any, *, step: int) -> None:
            calls.append(step)
            if fails_in == "log" and step == 2:
                raise ConnectionError("no route to host")

        def finish(self) -> None:
            if fails_in == "finish":
                raise TimeoutError("no answer")

    monkeypatch.setitem(records_module.START, "wandb", Unreachable)
    assert write(tmp_path, 1, 2, 3, 4, tracker="wandb+tensorboard") == [1, 2, 3, 4]
    (warning,) = caplog.records
    words = "wandb failed (ConnectionError: no route" if fails_in == "log" else "wandb failed (TimeoutError: no answer)"
    assert words in warning.message
    assert calls == ([1, 2] if fails_in == "log" else [1, 2, 3, 4])
    assert [step for step, _ in events(tmp_path)["loss"]] == [1, 2, 3, 4], "the other tracker goes on"


# TensorBoard's thread also raises its error as an unhandled exception.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_for_event_files_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = TrainConfig(steps=9, tracker="tensorboard")
    with Tracker(tmp_path, config, {}, step=0, active=True) as tracker, no_file_above(4_000):
        for step in range(1, 41):
            tracker.log({"step": step, "loss": 0.5, "grad_norm": 0.1, "learning_rate": 0.1})
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == list(range(1, 41))
    assert sum("tensorboard failed" in record.message for record in caplog.records) == 1


def test_wandb_that_cannot_start_is_an_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Error(Exception): ...

    def init(**_: Any) -> Any:
        raise Error("api_key not configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, errors=SimpleNamespace(Error=Error)))
    with pytest.raises(ValueError, match=r"can't start \(api_key not configured\); log in, or set WANDB_MODE=offline"):
        write(tmp_path, 1, tracker="wandb")


def test_the_bar_shows_the_whole_run_with_the_measured_beside_the_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    for active in (False, True):
        assert capsys.readouterr().err == ""
        with progress_bar(100, start=40, active=active) as bar:
            bar.update()
            show(bar, {"loss": 2.345, "tokens_per_step_estimate": 1.987}, (40, 1.765))
    shown = capsys.readouterr().err
    assert "41/100" in shown
    assert "loss 2.35, tokens per step 1.99 estimated, 1.76 measured at step 40" in shown
