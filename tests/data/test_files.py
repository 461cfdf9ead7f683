import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider.data.files import (
    LOCK_FILE,
    atomic_write_bytes,
    atomic_write_text,
    finish_replacing,
    guarded,
    locked,
    parse_json,
    read_dataclass,
    read_json,
    remove_leftovers,
    replacing,
    replacing_directory,
    sha256_file,
    write_json,
)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_file_and_raises_with_the_remedy(call, tmp_path, monkeypatch):
    path = tmp_path / "shard.bin"
    atomic_write_bytes(path, b"old")
    monkeypatch.setattr(os, call, full_disk)
    with pytest.raises(OSError, match=r"disk is full.*shard.bin.*unchanged.*Free some space") as raised:
        atomic_write_bytes(path, b"new")
    assert raised.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_fills_up_during_the_write_is_explained_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_write(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half_write)
    with pytest.raises(OSError, match="disk is full"):
        atomic_write_text(tmp_path / "a.txt", "text")
    assert list(tmp_path.iterdir()) == []


def test_another_error_passes_unchanged_and_leaves_no_temporary(tmp_path: Path) -> None:
    def interrupted() -> None:
        with replacing(tmp_path / "a.bin") as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        atomic_write_bytes(tmp_path / "file" / "a.bin", b"")


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


OLD, NEW = {"a": "old", "b": "old"}, {"a": "new"}


def replace_folder(path: Path, files: dict[str, str]) -> None:
    with replacing_directory(path) as folder:
        for name, text in files.items():
            (folder / name).write_text(text)


def test_a_folder_is_replaced_with_no_file_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder"
    replace_folder(path, OLD)
    link = tmp_path / "link"
    link.symlink_to(path)
    replace_folder(link, NEW)
    assert link.is_symlink()
    assert contents(path) == NEW
    assert list(path.parent.iterdir()) == [path]


def test_an_error_keeps_the_old_folder_and_a_full_disk_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    replace_folder(path, OLD)

    def fill_disk() -> None:
        with replacing_directory(path) as folder:
            (folder / "a").write_text("new")
            full_disk()

    with pytest.raises(OSError, match=r"disk is full.*folder.*unchanged"):
        fill_disk()
    assert contents(path) == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_neither_the_current_folder_nor_one_around_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a" / "b"
    replace_folder(inner, OLD)
    monkeypatch.chdir(inner)
    for path in (Path(), Path(".."), tmp_path / "a"):
        with pytest.raises(ValueError, match="contains the current folder"):
            replace_folder(path, NEW)
    assert contents(inner) == OLD


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("kept")
    for _ in range(2):
        with pytest.raises(ValueError, match="out is a file.*remove it, or choose another"):
            replace_folder(path, NEW)
    assert contents(tmp_path) == {"out": "kept"}


def test_a_reader_keeps_a_folder_that_only_has_the_name_of_a_replaced_one(tmp_path: Path) -> None:
    """Readers also open folders of users, and such a folder may be the user's."""
    replace_folder(tmp_path / "folder", NEW)
    replace_folder(tmp_path / ".folder.outrider-old", OLD)
    finish_replacing(tmp_path / "folder")
    assert contents(tmp_path / ".folder.outrider-old") == OLD


@pytest.mark.parametrize(
    ("owner", "name", "call", "expected"),
    [
        (Path, "write_text", 2, OLD),  # half of the new folder is written
        (os, "replace", 1, OLD),
        (os, "replace", 2, NEW),  # neither name exists
        (shutil, "rmtree", 3, NEW),  # the old folder lies beside the new one
    ],
)
def test_after_a_kill_the_next_write_leaves_one_complete_folder(owner, name, call, expected, tmp_path):
    path = tmp_path / "folder"
    replace_folder(path, OLD)
    if (pid := os.fork()) == 0:
        original, calls = getattr(owner, name), 0

        def die_in_call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os._exit(9)
            return original(*args, **options)

        setattr(owner, name, die_in_call)
        try:
            replace_folder(path, {**NEW, "c": "new"} if owner is Path else NEW)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9, "the process did not reach the call"
    finish_replacing(path)
    assert contents(path) == expected
    replace_folder(path, NEW)
    assert contents(path) == NEW
    assert list(tmp_path.iterdir()) == [path]


def test_of_two_writers_of_a_folder_one_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with locked(tmp_path):
        with replacing_directory(path) as folder:
            (folder / "a").write_text("new")
            with pytest.raises(ValueError, match="another process is at work in .*folder"):
                replace_folder(path, OLD)
            remove_leftovers(tmp_path)  # by a process that starts in the folder around it
        assert contents(path) == NEW
        assert {file.name for file in tmp_path.iterdir()} == {"folder", LOCK_FILE}


def test_json_is_read_back_and_its_folder_created(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_json(path, {"name": "ü", "values": [1, 2.5, None]})
    assert read_json(path) == {"name": "ü", "values": [1, 2.5, None]}
    assert sha256_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_nan_is_not_written_to_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


PIPE = b"a named pipe"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "does not exist"),
        (PIPE, "not a plain file"),
        (b"", "not a JSON file"),
        (b'{"a": 1', "not a JSON"),
        (b"\xff", "not a JSON"),
    ],
)
def test_a_missing_or_broken_json_file_is_named(content: bytes | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    if content == PIPE:
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    for read in (read_json, partial(read_dataclass, Inner)):
        with pytest.raises(ValueError, match=f"manifest.json {problem}|manifest.json is {problem}"):
            read(path)


@dataclass(kw_only=True)
class Inner:
    size: int


@dataclass(kw_only=True)
class Outer:
    name: str
    revision: str | None
    inner: Inner
    many: list[Inner]
    shares: dict[str, float]
    kept: bool = True


GOOD = {"name": "a", "revision": None, "inner": {"size": 1}, "many": [{"size": 2}], "shares": {"x": 1}}


def test_a_dataclass_is_parsed_through_all_its_levels() -> None:
    parsed = parse_json(Outer, json.dumps(GOOD), Path("f.json"))
    assert parsed == Outer(name="a", revision=None, inner=Inner(size=1), many=[Inner(size=2)], shares={"x": 1.0}, kept=True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"extra": 1}, "f.json: extra: there is no such key.* another version"),
        ({"inner": {}}, "inner.size: is missing"),
        ({"kept": 1}, "kept=1: must be true or false"),
        ({"many": [{"size": True}]}, r"many\[0\].size=true: must be a whole number"),
        ({"name": 3, "inner": {"size": 1.5}}, "name=3: .*; inner.size=1.5: must be a whole number"),
    ],
)
def test_unknown_keys_missing_keys_and_wrong_types_are_named(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(Outer, json.dumps({**GOOD, **change}), Path("f.json"))


def test_only_one_process_at_a_time_holds_the_lock_of_a_folder(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from outrider.data.files import locked\nwith locked(Path(sys.argv[1])): pass"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    with locked(tmp_path / "run"):
        held = subprocess.run(command, capture_output=True, text=True, check=False)
    assert held.returncode != 0
    assert "another process is at work in" in held.stderr
    subprocess.run(command, check=True)


def make(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    return path


def test_the_next_holder_of_the_lock_removes_only_what_killed_processes_of_its_run_have_left(tmp_path: Path) -> None:
    kept = [make(tmp_path / name) for name in ("a.json", "drafter/model.safetensors", ".hidden", "notes.tmp", "deep/.x.tmp")]
    users = (".settings.old/a", ".venv.partial/a", ".a.json.77.tmp", "run/.outrider.lock", "run/.b.json.7.outrider-tmp")
    kept += [make(tmp_path / name) for name in users]
    for name in (
        ".config.yaml.123.outrider-tmp",
        "eval/.summary.json.9.outrider-tmp",
        ".drafter.outrider-partial/model.safetensors",
        "train/checkpoints/.step-00000003.outrider-partial/state.pt",
        "train/.best.outrider-old/best.json",
        ".package.ab12_x.outrider-tmp/new/README.md",
        ".package.outrider-lock",
    ):
        make(tmp_path / name)
    make(tmp_path / "train/best/best.json")
    with locked(tmp_path):
        left = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*kept, tmp_path / LOCK_FILE, tmp_path / "train/best/best.json"}


def test_leftovers_of_a_kill_between_two_renames_are_completed_and_not_lost(tmp_path: Path) -> None:
    make(tmp_path / "train/.best.outrider-partial/best.json").write_text("new")
    make(tmp_path / "train/.best.outrider-old/best.json").write_text("old")
    with locked(tmp_path):
        assert [path.name for path in (tmp_path / "train").iterdir()] == ["best"]
        assert (tmp_path / "train/best/best.json").read_text() == "new"


def test_leftovers_behind_a_link_are_not_the_runs(tmp_path: Path) -> None:
    elsewhere = make(tmp_path / "elsewhere/.a.1.outrider-tmp")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / ".link.outrider-old").symlink_to(tmp_path / "elsewhere")
    with locked(tmp_path / "run"):
        pass
    assert elsewhere.exists()


def test_a_path_in_a_runs_folder_is_guarded_by_the_runs_lock(tmp_path: Path) -> None:
    run = tmp_path / "run"
    drafter = run / "variants" / "a" / "drafter"
    drafter.mkdir(parents=True)
    with locked(run):
        for path in (drafter, run / "new", run):
            with pytest.raises(ValueError, match=f"another process is at work in {run}"), guarded(path):
                pass
        with guarded(tmp_path / "other"):
            pass
    assert not (tmp_path / "other").exists(), "a path outside of a run needs no lock, and no folder"
    held = guarded(drafter, run, folders=[run, tmp_path / "out"])
    with held, pytest.raises(ValueError, match="at work in"), guarded(drafter):
        pass
    assert (tmp_path / "out" / LOCK_FILE).is_file()
    assert not (drafter / LOCK_FILE).exists()
