"""Records (one JSON-like value each) from local files and from data sets of the Hub."""

import gzip
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from .config import HUB_PREFIX
from .fields import first_of
from .forms import FORMS
from .hub import use_hub, why_offline
from .paths import looks_like_path

logger = logging.getLogger(__name__)

SUFFIXES = (".json", ".jsonl", ".ndjson", ".gz", ".parquet")
SURE_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".json.gz", ".parquet")
"""Suffixes of files that hold records and nothing else."""
MAX_LINE_CHARS = 1 << 26
"""Longest line with one record. A line with an array of records may be longer."""

NOT_JSON, CUT_FILE = "lines that are no JSON: not used", "files that were cut: read up to there"
EMPTY_FILE = "files without a record"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_records(
    path: str,
    *,
    split: str = "train",
    subset: str | None = None,
    file: str | None = None,
    revision: str | None = None,
) -> Iterator[Any]:
    """Read the records of local files, or of a data set of the Hub if there is no such file.

    `path` may be a file, a folder or a pattern. The other arguments are for the Hub; `file` is one file
    of the data set, whose splits are then ignored. Raises ValueError with location and remedy if the
    data can't be found or read, or hold no record. A name that looks like a local path is never searched for on the Hub.
    """
    if is_local(path):
        return read_records(record_files(path))
    use_hub()
    path = path.removeprefix(HUB_PREFIX)
    if file is not None:
        return read_records([_download(path, file, revision)])
    return _hub_records(path, split, subset, revision)


def local_files(path: str) -> list[Path]:
    """Return the files of a local path in order: one file, those of a folder, or those of a pattern.

    Hidden files and folders (.git, .venv) aren't the user's data.
    """
    root = Path(path)
    if root.is_file():
        return [root]
    if root.is_dir():
        inside = [file.relative_to(root) for file in root.rglob("*")]
        found = [root / file for file in inside if not any(part.startswith(".") for part in file.parts)]
    else:
        found = [Path(file) for file in glob(path, recursive=True)]  # noqa: PTH207
    return sorted(file for file in found if file.is_file())


def record_files(path: str) -> list[Path]:
    """Return a file, or those files of a folder or pattern that have records. Raises ValueError without any."""
    if Path(path).is_file():
        return [Path(path)]
    files = local_files(path)
    found = [file for file in files if file.name.lower().endswith(SUFFIXES)]
    if not found:
        is_there = files or Path(path).is_dir()
        what = "has no file of records" if is_there else "doesn't exist, or no name is like it; give files of records"
        raise ValueError(f"{path} {what} ({', '.join(SUFFIXES)})")
    if others := sorted({file.name for file in files} - {file.name for file in found}):
        logger.warning("%s: left out, since they are no files of records: %s", path, first_of(others))
    return found


def is_local(path: str) -> bool:
    """Return whether `path` is a local file, folder or pattern, not an id of the Hub.

    Raises ValueError if it can be neither.
    """
    if path.startswith(HUB_PREFIX) and HUB_ID.fullmatch(path.removeprefix(HUB_PREFIX)):
        return False
    if Path(path).exists() or (has_magic(path) and glob(path, recursive=True)):  # noqa: PTH207
        return True
    if looks_like_path(path) or not HUB_ID.fullmatch(path):
        raise ValueError(
            f"the data path {path!r} does not exist. Give an existing file, or a data set id of the Hub (owner/name)"
        )
    return False


def read_records(files: Sequence[Path], broken: Counter[str] | None = None) -> Iterator[Any]:
    """Read the records of .json, .jsonl (both also as .gz) or .parquet files, in order.

    JSON is one record per line, one array of records, or one object with such an array under `data`,
    whatever the file's suffix. Files without a record are named at the end. Raises ValueError if all files
    are empty, and with the line if one is malformed. With `broken`, for logs, lines that are no JSON, cut files and empty
    ones are counted there and left out: the last line may be half written.
    """
    empty = []
    for file in files:
        if file.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{file}: unknown kind of data file {file.suffix!r}; use one of {', '.join(SUFFIXES)}")
        records = _parquet_records(file) if file.suffix.lower() == ".parquet" else _json_records(file, broken)
        num_records = 0
        for record in records:
            num_records += 1
            yield record
        if not num_records:
            empty.append(str(file))
    if empty and broken is not None:
        broken[EMPTY_FILE] += len(empty)
    elif empty and len(empty) == len(files):
        raise ValueError(f"{first_of(empty)} holds no record. Check that downloads and exports were finished")
    elif empty:
        logger.warning("files without a record: %s", first_of(empty))


def _json_records(path: Path, broken: Counter[str] | None) -> Iterator[Any]:
    with _opened(path, broken) as file:
        first = True
        for line_number, line in enumerate(iter(partial(file.readline, MAX_LINE_CHARS + 1), ""), 1):
            if first and (line.lstrip().startswith("[") or line.strip() == "{"):  # an array, or an object of several lines
                yield from _whole_file(line + file.read(), path, line_number, broken)
            elif len(line) > MAX_LINE_CHARS:
                raise ValueError(
                    f"{path}, line {line_number}: it has more than {MAX_LINE_CHARS} characters. Write one JSON object per "
                    "line, or one array of objects"
                )
            elif line.strip():
                yield from _of_line(line, path, line_number, broken)
            first = first and not line.strip()


def _whole_file(text: str, path: Path, line_number: int, broken: Counter[str] | None) -> Iterator[Any]:
    """Yield the records of a text that is one value; of a log with another beginning, those of its lines."""
    try:
        value = _parse_json(text, path, line_number)
    except ValueError:
        if broken is None:
            raise
        for line in filter(str.strip, text.split("\n")):
            yield from _of_line(line, path, line_number, broken)
    else:
        yield from value if isinstance(value, list) else _unpacked(value)


def _of_line(line: str, path: Path, line_number: int, broken: Counter[str] | None) -> list[Any]:
    try:
        return _unpacked(_parse_json(line.rstrip(), path, line_number))
    except ValueError:
        if broken is None:
            raise
        broken[NOT_JSON] += 1
        return []


def _unpacked(value: Any) -> list[Any]:
    """Return the records of an object that has a list of them under `data`; another value alone."""
    records = value.get("data") if isinstance(value, dict) else None
    if isinstance(records, list) and records and all(isinstance(record, dict) for record in records):
        others = [other for key, other in value.items() if key != "data"]
        is_record = any(form.fits(value) for form in FORMS.values())  # which has a key `data`
        if not is_record and not any(isinstance(other, list | dict) for other in others):
            return records
    return [value]


def line_of_record(path: Path, index: int) -> int | None:
    """Return the line of a file's record `index`, counted from 1; None if it has no line.

    Records in arrays and Parquet files have no line.
    """
    if path.suffix.lower() == ".parquet":
        return None
    with _opened(path, Counter()) as file:
        filled = (number for number, line in enumerate(file, 1) if line.strip() and _is_json(line))
        line = next(islice(filled, index, None), None)
        file.seek(0)
        start = next(filter(None, map(str.strip, file)), "")
    return None if start.startswith("[") or start == "{" or '"data"' in start else line


def _is_json(line: str) -> bool:
    """Whether a line can be read; others are left out of logs."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_json(text: str, path: Path, line_number: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {line_number + error.lineno - 1}, column {error.colno}: not JSON ({error.msg}). Expected one JSON "
            "object per line, or one array of objects. Repair or remove that line, or fetch the file again if it was cut"
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise ValueError(
            f"{path}, line {line_number}: JSON that can't be read ({error}). Repair or remove that line"
        ) from error


@contextmanager
def _opened(path: Path, broken: Counter[str] | None = None) -> Iterator[TextIO]:
    """Open a text file, plain or gzip. Raises ValueError with its name if it is damaged; for logs see `read_records`."""
    # utf-8-sig: some exports begin with a byte order mark, which JSON doesn't allow. Half a character ends half a line.
    options: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "strict" if broken is None else "replace"}
    with gzip.open(path, "rt", **options) if path.suffix.lower() == ".gz" else path.open(**options) as file:
        try:
            yield file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            if broken is None:
                raise ValueError(f"{path} is not a complete gzip file ({error}). Download or compress it again") from error
            broken[CUT_FILE] += 1
        except UnicodeDecodeError as error:
            line = _first_wrong_line(path)
            raise ValueError(f"{path} is not UTF-8 text in line {line} ({error.reason}). Convert it to UTF-8") from error


def _first_wrong_line(path: Path) -> int:
    """Return the line of a file, plain or gzip, that isn't UTF-8, counted from 1."""
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        line = 0
        with suppress(UnicodeDecodeError):
            for line, content in enumerate(file, 1):  # noqa: B007 - the line of the error
                content.decode()
        return line


def _parquet_records(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from map(_without_nulls, batch.to_pylist())
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a complete Parquet file ({error}). Download or export it again") from error


def _download(name: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError
    from huggingface_hub.utils import httpx  # its HTTP client, which isn't always the package httpx

    try:
        return Path(hf_hub_download(name, file, repo_type="dataset", revision=revision))
    # ValueError: a malformed reply or address.
    except (OSError, EntryNotFoundError, HFValidationError, httpx.HTTPError, ValueError) as error:
        raise ValueError(_no_hub(f"the file {file!r} of the data set {name!r}", error)) from error


def _hub_records(name: str, split: str, subset: str | None, revision: str | None) -> Iterator[Any]:
    import datasets
    from huggingface_hub.utils import httpx

    try:
        data = datasets.load_dataset(name, subset, split=split, revision=revision)
    # `datasets` raises any of these: no connection, no such data set, split or subset, a script as
    # data set.
    except (OSError, ValueError, RuntimeError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(_no_hub(f"split {split!r} of the data set {name!r}", error)) from error
    if len(data) == 0:
        raise ValueError(f"split {split!r} of the data set {name!r} holds no record")
    return map(_without_nulls, data)


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that Arrow adds to an object, since another record's object has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _no_hub(what: str, error: Exception) -> str:
    """Why it isn't there. The caller adds the remedy, which names its option."""
    if not use_hub():
        return f"{what} is neither a local file nor in the cache, and {why_offline()}"
    return f"{what} is no local file, and can't be loaded from the Hugging Face Hub: {error}"
