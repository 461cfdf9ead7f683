"""Files and folders of a run: written whole or not at all, hashed, and read back strictly.

A file or folder has one writer. A reader sees the old content or the new one, never a part of either.
"""

import errno
import hashlib
import json
import os
import shutil
import types
import typing
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LOCK_FILE = ".lock"

SEAL_KEY = "sha256"
"""Where a sealed file keeps the digest of the rest."""

OLD_IS_KEPT = "No half-written file was left: what was there before is unchanged, and every file finished earlier is kept"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which takes `path`'s place when the block ends without an error.

    On an error the temporary file is removed and `path` stays as it was. A full disk (or quota) becomes an OSError that says
    what was kept and what to do. A killed process leaves at most a `.NAME.PID.tmp`, which no reader takes for a result.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming_full_disk(path, OLD_IS_KEPT):
            yield temporary
            with open(temporary, "r+b") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """A new, empty folder to write to, which replaces the folder `path` when the block ends without an error.

    On an error the new folder is removed and `path` stays as it was; a full disk raises the OSError of `replacing`. A killed
    process leaves the old folder or the new one, and at most a `.NAME.partial` and a `.NAME.old`, which the next writer
    removes. Between two renames `path` is missing for a moment: `finish_replacing` completes what a kill there has left.
    Raises ValueError for the current folder, which a shell would be left without.
    """
    path = path.resolve()
    if path == Path.cwd():
        raise ValueError(f"{path} is the folder you are in; name another folder")
    finish_replacing(path)
    partial, old = partial_directory(path), _old_directory(path)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with naming_full_disk(path, OLD_IS_KEPT):
            partial.mkdir(parents=True)
            yield partial
            if path.exists():
                os.replace(path, old)
            os.replace(partial, path)
            _sync_directory(path.parent)
    finally:
        finish_replacing(path)
        shutil.rmtree(partial, ignore_errors=True)


def finish_replacing(path: Path) -> None:
    """Complete the replacement of the folder `path` where a killed process has begun it (see `replacing_directory`)."""
    partial, old = partial_directory(path), _old_directory(path)
    if old.exists() and partial.exists() and not path.exists():
        os.replace(partial, path)
    shutil.rmtree(old, ignore_errors=True)


def partial_directory(path: Path) -> Path:
    """The folder that `replacing_directory(path)` writes to."""
    real = path.resolve()
    return real.with_name(f".{real.name}.partial")


def _old_directory(path: Path) -> Path:
    real = path.resolve()
    return real.with_name(f".{real.name}.old")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the folder (which is made where missing) until the block ends, or the process does. Raises ValueError where another
    process holds it."""
    import fcntl  # Windows has none, where all but runs works too

    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK_FILE, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):  # a file system without locks
                yield
                return
            raise ValueError(
                f"another process is at work in {directory}: wait for it, or end it (workers may outlive a launcher that was "
                "killed), or choose another output directory"
            ) from error
        yield


@contextmanager
def naming_full_disk(path: Path, kept: str) -> Iterator[None]:
    """Give the OSError of a full disk (or quota) the file's name, what was `kept` of it, and a remedy; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"the disk is full (or its quota used up) while writing {path}. {kept}. Free some space, or choose an output "
            "directory on another disk and move the run there; the same command then goes on from what is complete",
        ) from error


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` (its folder is made where missing), whole or not at all. Errors as in `replacing`."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, whole or not at all. Errors as in `replacing`."""
    atomic_write_bytes(path, text.encode("utf-8"))


def sha256_file(path: Path) -> str:
    """The file's SHA-256 digest in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. NaN and infinity, which are not JSON, are ValueErrors."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value of a file. Raises ValueError, naming the file, where it is missing or malformed."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist; expected a JSON file. Check the path, or run the stage that writes it"
        ) from None
    except (ValueError, RecursionError) as error:  # malformed, not UTF-8, or nested without end
        raise ValueError(
            f"{path} is not a JSON file ({error}). It was altered or cut: restore it, or run the stage that writes it"
        ) from error


def write_sealed(path: Path, value: Any) -> None:
    """Write a dataclass as JSON, whole or not at all, with a digest of what it says."""
    content = asdict(value)
    write_json(path, {**content, SEAL_KEY: _content_sha256(content)})


def read_sealed(cls: type[T], path: Path) -> T:
    """A dataclass that `write_sealed` wrote. Raises ValueError as `parse_dataclass` does, and where anything was altered."""
    content = read_json(path)
    recorded = content.pop(SEAL_KEY, None) if isinstance(content, dict) else None
    value = parse_dataclass(cls, content, path)
    if recorded != _content_sha256(content):
        raise ValueError(
            f"{path} was altered: its SHA-256 digest is not the recorded one. Restore it, or make its folder anew elsewhere"
        )
    return value


def _content_sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parse_dataclass(cls: type[T], value: Any, path: Path) -> T:
    """A dataclass from a parsed JSON value, strictly: unknown keys, missing keys and wrong types are ValueErrors.

    Knows str, int, float, bool, None, lists, dicts, unions with None and nested dataclasses. Every error names `path`,
    those of the dataclass's own checks too.
    """
    try:
        return _parse(cls, value, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (hint,) = [arg for arg in args if arg is not type(None)]
        return _parse(hint, value, where)
    if origin is list and isinstance(value, list):
        if set(map(type, value)) <= {args[0]}:  # what most of a record's bytes are: token ids
            return value
        return [_parse(args[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _parse(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(hint) and isinstance(value, dict):
        make: Any = hint
        hints, required = _fields(make)
        _check_keys(value, required, hints.keys(), where)
        return make(**{key: _parse(hints[key], item, f"{where}.{key}") for key, item in value.items()})
    # bool is an int to Python, but not in a file; a whole number is a float to both.
    if hint is Any or type(value) is hint:
        return value
    if hint is float and type(value) is int:
        return float(value)
    expected = getattr(hint, "__name__", str(hint))
    raise ValueError(f"{where.lstrip('.') or 'the whole'} is {value!r:.80}; expected a value of type {expected}")


@cache
def _fields(cls: Any) -> tuple[dict[str, Any], Set[str]]:
    """A dataclass's type hints, and the names of its fields that have no default."""
    required = {field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING}
    return typing.get_type_hints(cls), required


def _check_keys(value: dict[str, Any], required: Set[str], known: Set[str], where: str) -> None:
    problems = []
    if unknown := sorted(value.keys() - known):
        problems.append(f"unknown keys {', '.join(unknown)}")
    if missing := sorted(required - value.keys()):
        problems.append(f"missing keys {', '.join(missing)}")
    if problems:
        place = f" in {where.lstrip('.')}" if where else ""
        raise ValueError(
            f"{' and '.join(problems)}{place}; the keys are {', '.join(known)}. "
            "It was altered or comes from another version of outrider: make it anew with this one"
        )


def _sync_directory(directory: Path) -> None:
    # Without this a power cut may forget the rename although the file's content is safe.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
