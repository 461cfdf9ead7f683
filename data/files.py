"""Files and folders of a run: written atomically, hashed, and read strictly.

A file or folder has one writer. A reader sees the old content or the new content, never a mixture.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from itertools import count
from pathlib import Path
from types import GenericAlias
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from .fields import problems_of

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOCK_FILE = ".outrider.lock"
PARTIAL, OLD, LOCK, TEMPORARY = ".outrider-partial", ".outrider-old", ".outrider-lock", ".outrider-tmp"
"""Endings of temporary files and folders. No other program's files have them."""
LEFTOVER = re.compile(rf"\..+({'|'.join(map(re.escape, (PARTIAL, OLD, LOCK, TEMPORARY)))})")

OLD_IS_KEPT = "No half-written file was left: what was there before is unchanged, and every file finished earlier is kept"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends without an error.

    On an error the temporary file is removed and `path` stays as it was. A full disk (or quota)
    raises an OSError that explains what was kept and what to do. A killed process leaves at most a
    `.NAME.PID.outrider-tmp`, which no reader reads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with naming_full_disk(path, OLD_IS_KEPT):
            yield temporary
            with open(temporary, "r+b") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def earlier_path(path: Path) -> Path:
    """Return the first free one of `PATH_earlier_1`, `PATH_earlier_2`, ..."""
    return next(free for number in count(1) if not (free := Path(f"{path}_earlier_{number}")).exists())


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `path` when the block ends without an error.

    On an error the new folder is removed and `path` stays as it was. A full disk raises the OSError
    of `replacing`. A killed process leaves the old folder or the new one. It may also leave
    `.NAME.outrider-partial` and `.NAME.outrider-old`, which the next writer removes. Between two renames `path` is
    missing for a moment: after a kill there, `finish_replacing` completes the replacement.

    Raises ValueError if another process writes this folder at the moment, or if `path` is a file. Also
    raises it if `path` is or contains the current folder: a shell in that folder would lose it.
    """
    # 1. Check the folder, lock it, and remove leftovers of a killed process.
    path = path.resolve()
    if Path.cwd().is_relative_to(path):
        raise ValueError(f"{path} is or contains the current folder; change to another folder, or choose another one")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, and a folder must be written there; remove it, or choose another folder")
    partial, old = partial_directory(path), _old_directory(path)
    with naming_full_disk(path, OLD_IS_KEPT), _sole_writer(path):
        _clean_up_after(path)
        # 2. Let the caller write, then swap the folders by two renames.
        try:
            partial.mkdir(parents=True)
            yield partial
            if path.exists():
                os.replace(path, old)
            os.replace(partial, path)
            _sync_directory(path.parent)
        # 3. Clean up, after an error too.
        finally:
            _clean_up_after(path)


def _clean_up_after(path: Path) -> None:
    """Complete or undo the replacement of a folder. Only for its writer."""
    finish_replacing(path)
    for leftover in (_old_directory(path), partial_directory(path)):
        shutil.rmtree(leftover, ignore_errors=True)


def _sole_writer(path: Path) -> ExitStack:
    """Lock `path` for one writer, until the result is closed. Raises ValueError if it is locked.

    The lock file beside `path` is removed at the end, so a waiting process may hold a removed one.
    """
    lock = path.with_name(f".{path.name}{LOCK}")
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack, suppress(FileNotFoundError):
            file = stack.enter_context(open(lock, "a"))
            _lock(file.fileno(), path)
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                stack.callback(lock.unlink, missing_ok=True)
                return stack.pop_all()


def finish_replacing(path: Path) -> None:
    """Complete a replacement of the folder `path` that was interrupted by a kill.

    See `replacing_directory`. Does nothing if the folder exists. Readers call this before they
    report a folder as missing.
    """
    partial, old = partial_directory(path), _old_directory(path)
    if not path.exists() and old.exists() and partial.exists():
        os.replace(partial, path)


def partial_directory(path: Path) -> Path:
    """Return the folder that `replacing_directory(path)` writes to."""
    real = path.resolve()
    return real.with_name(f".{real.name}{PARTIAL}")


def _old_directory(path: Path) -> Path:
    real = path.resolve()
    return real.with_name(f".{real.name}{OLD}")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a folder until the block ends or the process dies; the folder is created if missing.

    Also removes what killed processes have left in it (`remove_leftovers`). Raises ValueError if
    another process holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK_FILE, "a") as file:
        if _lock(file.fileno(), directory):
            remove_leftovers(directory)
        yield


def _lock(descriptor: int, directory: Path) -> bool:
    """Lock an open file or folder of `directory`; False where the file system has no locks.

    Raises ValueError if another process holds the lock.
    """
    import fcntl  # missing on Windows, where everything except runs works too

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise ValueError(
            f"another process is at work in {directory}: wait for it, or end it (workers may outlive a killed launcher), "
            "or choose another output directory"
        ) from error
    return True


@contextmanager
def guarded(*paths: Path, folders: Iterable[Path] = ()) -> Iterator[None]:
    """Lock `folders`, and each run's folder that contains one of `paths`.

    A run's folder has a lock file; a path outside of all such folders needs no lock. Raises
    ValueError as `locked` does.
    """
    around = {parent for path in paths for parent in (path.resolve(), *path.resolve().parents)}
    held = {folder for folder in around if (folder / LOCK_FILE).is_file()} | {folder.resolve() for folder in folders}
    with ExitStack() as stack:
        for folder in sorted(held):
            stack.enter_context(locked(folder))
        yield


def remove_leftovers(directory: Path) -> None:
    """Remove temporary files and folders of killed processes, also from folders below.

    Only for the holder of the folder's lock. An interrupted replacement is completed first. A folder
    below with a lock of its own belongs to another run, whose next process cleans it.
    """
    for root, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if not Path(root, name, LOCK_FILE).exists()]
        leftovers = [name for name in (*folders, *files) if LEFTOVER.fullmatch(name)]
        folders[:] = [name for name in folders if name not in leftovers]
        for name in leftovers:
            leftover = Path(root, name)
            replaced = leftover.with_name(name[1:].rpartition(".")[0])
            # A writer that doesn't know of this folder's lock may be at work below it.
            with suppress(ValueError), nullcontext() if name.endswith(TEMPORARY) else _sole_writer(replaced):
                finish_replacing(replaced)
                logger.info("removing %s, which a killed process has left", leftover)
                shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


@contextmanager
def naming_full_disk(path: Path, kept: str) -> Iterator[None]:
    """Explain the OSError of a full disk (or quota): the file, what was `kept`, and a remedy.

    Other errors pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"the disk is full (or its quota used up) while writing {path}. {kept}. Free some space, or choose an output "
            "directory on another disk and move the run there; the same command then resumes",
        ) from error


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically, and create its folder. Errors as in `replacing`."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically. Errors as in `replacing`."""
    atomic_write_bytes(path, text.encode("utf-8"))


def sha256_file(path: Path) -> str:
    """Return the file's SHA-256 digest in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Return a digest of a JSON value; the order of keys doesn't matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def drop_from_cache(path: Path, start: int = 0, num_bytes: int = 0) -> None:
    """Remove a file, or a part of it, from the system's page cache; systems may ignore it."""
    if sys.platform == "linux":
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_DONTNEED)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. Raises ValueError for NaN and infinity."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ValueError with the file's name if it is missing or malformed."""
    content = _read(path)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # malformed, not UTF-8, or nested too deeply
        raise _not_json(path, error) from error


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is not a plain file; expected a JSON file. Remove it, or give another path")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist; expected a JSON file. Check the path, or run the stage that writes it"
        ) from None


def _not_json(path: Path, problem: object) -> ValueError:
    return ValueError(
        f"{path} is not a JSON file ({problem}). It was altered or truncated: restore it, or run the stage that writes it"
    )


def read_dataclass(cls: type[T] | GenericAlias, path: Path) -> T:
    """Read a dataclass, or a list of TypedDicts, from a JSON file.

    Raises ValueError like `read_json` and `parse_json`.
    """
    return parse_json(cls, _read(path), path)


def parse_json(cls: type[T] | GenericAlias, text: str | bytes, path: Path) -> T:
    """Parse a dataclass from JSON, strictly.

    Raises ValueError that names `path` and every problem: unknown keys, missing keys, wrong types,
    and the dataclass's own checks.
    """
    try:
        return _adapter(cls).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        details = {detail["type"]: detail for detail in error.errors()}
        if "json_invalid" in details:
            raise _not_json(path, details["json_invalid"]["ctx"]["error"]) from None
        remedy = ""
        if details.keys() & {"missing", "unexpected_keyword_argument", "extra_forbidden"}:
            remedy = ". It was altered or comes from another version of outrider: create it again with this version"
        raise ValueError(f"{path}: {'; '.join(problems_of(error))}{remedy}") from None


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _sync_directory(directory: Path) -> None:
    # Without this, a power failure may lose the rename although the file's content is safe.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
