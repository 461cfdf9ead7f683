"""Complete and incomplete checkpoints, what they hold, and writing them while training continues."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from outrider.data.files import sha256_file
from outrider.train import checkpoint as checkpoint_module
from outrider.train.checkpoint import (
    Checkpoints,
    HostCopy,
    complete_checkpoints,
    latest_checkpoint,
    random_state,
    read_marker,
    remove_incomplete,
    require_unchanged,
    set_random_state,
)

from .conftest import edit_marker, no_file_above


@contextmanager
def checkpoints(accelerator: Accelerator, directory: Path, *, keep: int = 9) -> Iterator[tuple[torch.nn.Module, Checkpoints]]:
    accelerator.free_memory()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    with Checkpoints(accelerator, directory, prepared, optimizer, keep=keep) as saver:
        yield prepared, saver


def saved(accelerator: Accelerator, directory: Path, *steps: int, **options: Any) -> None:
    with checkpoints(accelerator, directory, **options) as (model, saver):
        for step in steps:
            torch.nn.init.constant_(model.weight, step)
            saver.save(step, {"extra": step * 10})


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Delay all writes until the event is set."""
    event, save = threading.Event(), torch.save

    def save_slowly(*args: Any) -> None:
        assert event.wait(timeout=20)
        save(*args)

    monkeypatch.setattr(checkpoint_module.torch, "save", save_slowly)
    return event


def test_only_the_newest_checkpoints_are_kept_and_the_last_is_loaded(accelerator: Accelerator, tmp_path: Path) -> None:
    saved(accelerator, tmp_path, 9, 10, 11, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]
    with checkpoints(accelerator, tmp_path) as (model, saver):
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        marker = saver.load(latest)
    assert (marker.step, marker.state) == (11, {"extra": 110})
    assert torch.equal(model.weight, torch.full((2, 2), 11.0))


def test_a_checkpoint_has_the_state_of_its_step_and_not_of_the_write(accelerator, tmp_path, slow_disk):
    def train_a_step() -> None:
        model(torch.rand(3, 2)).sum().backward()
        saver._optimizer.step()
        saver._optimizer.zero_grad()

    with checkpoints(accelerator, tmp_path) as (model, saver):
        train_a_step()
        saver.save(1, {})
        assert not complete_checkpoints(tmp_path), "save must not wait for the disk"
        train_a_step()  # from the bits and random numbers of step 1
        expected = model.weight.detach().clone()
        slow_disk.set()
    with checkpoints(accelerator, tmp_path) as (model, saver):
        saver.load(tmp_path / "step-00000001")
        train_a_step()
    assert torch.equal(model.weight, expected)


def test_one_write_at_a_time(accelerator: Accelerator, tmp_path: Path, slow_disk: threading.Event) -> None:
    with checkpoints(accelerator, tmp_path) as (model, saver):
        torch.nn.init.constant_(model.weight, 1)
        saver.save(1, {})
        threading.Timer(0.2, slow_disk.set).start()
        torch.nn.init.constant_(model.weight, 2)
        saver.save(2, {})
        assert (tmp_path / "step-00000001").is_dir(), "the copy of step 1 is overwritten only when it is on the disk"
    weights = [torch.load(path / "state.pt")["model"]["weight"] for path in complete_checkpoints(tmp_path)]
    assert [float(weight[0, 0]) for weight in weights] == [1.0, 2.0]


@pytest.mark.parametrize("ask", ["save", "finish", "end"])
def test_an_error_of_the_thread_is_raised_at_the_next_checkpoint_or_the_end(accelerator, tmp_path, ask):
    saved(accelerator, tmp_path, 1)

    def fail() -> None:
        with checkpoints(accelerator, tmp_path) as (_, saver):
            with no_file_above(100):
                saver.save(2, {})
                saver._last.exception()
            if ask == "save":
                saver.save(3, {})
            elif ask == "finish":
                saver.finish()

    with pytest.raises(OSError, match=r"checkpoint of step 2 could not be written.*step-00000001\. Make room"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_an_error_of_training_waits_for_the_write_and_is_raised(accelerator, tmp_path, slow_disk, caplog):

    def interrupted(step: int, most_bytes: int) -> None:
        with no_file_above(most_bytes), checkpoints(accelerator, tmp_path) as (_, saver):
            saver.save(step, {})
            threading.Timer(0.2, slow_disk.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(1, most_bytes=100_000)
    assert len(complete_checkpoints(tmp_path)) == 1
    with pytest.raises(KeyboardInterrupt):
        interrupted(2, most_bytes=100)
    assert "checkpoint of step 2 could not be written" in caplog.text


def test_incomplete_checkpoints_are_ignored_and_removed(accelerator: Accelerator, tmp_path: Path) -> None:
    saved(accelerator, tmp_path, 1, 2, 3, 4, 5, 7, 8, 9)
    for step, marker in ((7, "{}"), (8, "[]"), (9, '{"files": 3}')):
        (tmp_path / f"step-0000000{step}" / "complete.json").write_text(marker)
    (tmp_path / "step-00000005" / "complete.json").unlink()  # killed during its removal
    # a power cut truncated the marker
    (tmp_path / "step-00000004" / "complete.json").write_text('{"step": 4, "fil')
    weights = tmp_path / "step-00000003" / "state.pt"
    weights.write_bytes(weights.read_bytes()[:-1])  # a power cut truncated the weights
    half = tmp_path / ".step-00000006.outrider-partial"
    half.mkdir()
    (half / "state.pt").write_bytes(b"half")
    (tmp_path / ".step-00000006.outrider-lock").touch()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]
    remove_incomplete(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_sharded_state_needs_the_same_number_of_processes(accelerator, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "sharding", lambda accelerator: "zero2")

    def save_state(folder: str) -> None:
        (Path(folder) / "pytorch_model").mkdir()
        torch.save(model.state_dict(), Path(folder) / "pytorch_model" / "rank_0.pt")

    loaded: list[str] = []
    monkeypatch.setattr(accelerator, "save_state", save_state)
    monkeypatch.setattr(accelerator, "load_state", loaded.append)
    with checkpoints(accelerator, tmp_path, keep=1) as (model, saver):
        for step in (1, 2):
            saver.save(step, {"extra": step})
            assert latest_checkpoint(tmp_path) == tmp_path / f"step-{step:08d}", "it is there when save returns"
        (kept,) = tmp_path.iterdir()
        assert saver.load(kept).state == {"extra": 2}
        assert loaded == [str(kept)]
        (kept / "pytorch_model" / "rank_0.pt").write_bytes(b"torn")
        assert latest_checkpoint(tmp_path) is None, "files in folders count too"
        edit_marker(kept, num_processes=4)
        with pytest.raises(ValueError, match="is in 4 parts by zero2, and there are 1 processes now"):
            saver.load(kept)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("an edited value", lambda marker: marker["state"].update(examples_read=100)),
        ("an edited float in a list", lambda marker: marker["state"]["meter"].__setitem__(1, 0.25)),
        ("a null", lambda marker: marker["state"].update(run=None)),
        ("a missing key", lambda marker: marker.pop("state")),
        ("a wrong type", lambda marker: marker.update(num_processes="one")),
        ("an unknown key", lambda marker: marker.update(extra=1)),
        ("another digest of a file", lambda marker: marker["files"]["state.pt"].update(sha256="0" * 64)),
        ("no digest", lambda marker: marker.pop("sha256")),
    ],
)
def test_an_edited_marker_is_an_error_with_the_remedy_and_not_another_training(accelerator, tmp_path, name, change):
    with checkpoints(accelerator, tmp_path) as (_, saver):
        saver.save(1, {"examples_read": 156, "run": {"steps": 3}, "meter": [0.1, 1 / 3]})
    checkpoint = tmp_path / "step-00000001"
    marker = json.loads((checkpoint / "complete.json").read_text())
    change(marker)
    (checkpoint / "complete.json").write_text(json.dumps(marker))
    with checkpoints(accelerator, tmp_path) as (_, saver), pytest.raises(ValueError, match=r"is damaged .*; delete it"):
        saver.load(checkpoint)


def test_a_marker_of_another_layout_and_the_same_values_is_read(accelerator: Accelerator, tmp_path: Path) -> None:
    saved(accelerator, tmp_path, 1)
    path = tmp_path / "step-00000001" / "complete.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert read_marker(path.parent).state == {"extra": 10}


def test_a_checkpoint_of_an_earlier_format_is_kept_and_named(accelerator: Accelerator, tmp_path: Path) -> None:
    saved(accelerator, tmp_path, 1)
    earlier = {"step": 1, "format_version": 2, "files": {"state.pt": 5}, "run": {}}
    (tmp_path / "step-00000001" / "complete.json").write_text(json.dumps(earlier))
    remove_incomplete(tmp_path)
    with pytest.raises(ValueError, match=r"has format 2, and this version .* reads format 3\. Resume .* or delete"):
        read_marker(tmp_path / "step-00000001")


def test_each_process_reads_a_share_of_the_files_and_all_raise(accelerator, tmp_path, monkeypatch):
    """Two processes, one after the other: what the first one finds reaches the second one."""
    saved(accelerator, tmp_path, 1)
    checkpoint, read = tmp_path / "step-00000001", []
    for name in ("a", "b", "c"):
        (checkpoint / name).write_bytes(b"x")
    files = {
        path.name: {"num_bytes": 1, "sha256": sha256_file(path)} for path in sorted(checkpoint.iterdir()) if len(path.name) == 1
    }
    edit_marker(checkpoint, files=files)
    (checkpoint / "c").write_bytes(b"y")
    digest = checkpoint_module.sha256_file
    monkeypatch.setattr(checkpoint_module, "sha256_file", lambda path: read.append(path.name) or digest(path))
    monkeypatch.setattr(checkpoint_module, "gather_object", lambda names: names or ["c"])
    for index, share in enumerate((["a", "c"], ["b"])):
        processes = Mock(spec=Accelerator, process_index=index, num_processes=2)
        with pytest.raises(ValueError, match="c has another checksum"):
            require_unchanged(checkpoint, read_marker(checkpoint), processes)
        assert read == share
        read.clear()


# --- what a checkpoint holds


def test_a_copy_keeps_values_kinds_and_nesting_and_shares_no_memory() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2).T)  # not contiguous
    state = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": weight}}, "groups": [{"betas": (0.9, 0.99), "params": [0]}]}
    copy = HostCopy()(state)
    before = weight.detach().clone()
    weight.data.zero_()
    assert torch.equal(copy["state"][0]["exp_avg"], before)
    assert not copy["state"][0]["exp_avg"].requires_grad
    assert copy["groups"] == state["groups"]
    assert type(copy["groups"][0]["betas"]) is tuple


def test_the_next_copy_takes_the_same_memory_unless_a_shape_has_changed() -> None:
    copy, state = HostCopy(), {"a": torch.ones(4), "b": torch.ones(4)}
    first = copy(state)
    second = copy({"a": torch.zeros(4), "b": torch.zeros(5)})
    assert second["a"].data_ptr() == first["a"].data_ptr() != second["b"].data_ptr()
    assert first["b"].tolist() == [1.0] * 4
    assert second["b"].tolist() == [0.0] * 5


def test_every_random_generator_is_restored() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]

    np.random.randn()
    state = random_state(torch.device("cpu"))
    drawn = draw()
    assert draw() != drawn
    set_random_state(state, torch.device("cpu"))
    assert draw() == drawn
