"""Where the tensors of safetensors files lie, and in which pieces files are read.

Format of a file: eight bytes with the length of the header, the header in JSON, then the data.
Nothing promises that tensors begin at addresses of their type, or in the header's order.
"""

import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...data.files import drop_from_cache

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SHARD, SHARD_NAME = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors"), "model-{:05d}-of-{:05d}.safetensors"
"""Names of the files of weights in several files."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
PAGE = 4096
"""Reads past the page cache begin at multiples of this number of bytes, and have such lengths."""
WINDOW_BYTES = 8 << 20
"""Bytes of one read. Larger reads gain nothing, and a read can't be broken off."""
MAX_GAP_BYTES = 1 << 18
"""Tensors closer to each other than this are read together, with the bytes between them."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place, type and shape of a tensor in a file."""

    path: Path
    name: str
    offset: int
    """Position of the first byte in the file."""
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Position behind the last byte."""
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one tensor within a window."""

    tensor: int
    """Index in the list of tensors."""
    first: int
    """First element, in the flat tensor."""
    count: int
    position: int
    """Position of the first element's first byte in the window."""


@dataclass(frozen=True, slots=True)
class FileWindow:
    """One read of a file, which begins at a multiple of PAGE."""

    path: Path
    start: int
    num_bytes: int
    """Bytes that the pieces need. A read past the page cache rounds this up."""
    pieces: tuple[Piece, ...]


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model's folder by name.

    Like transformers, it prefers a single file, and takes a tensor from the last file that has it.
    Raises ValueError if there are no safetensors files, or if a file is missing or damaged.
    """
    if (folder / SINGLE_FILE).is_file():
        return read_header(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).is_file():
        index = read_index(folder / INDEX_FILE)
        files = {folder / name for name in index.values()}
        tensors = _read_headers(files)
        if missing := sorted(index.keys() - tensors.keys()):
            raise ValueError(f"{folder / INDEX_FILE} names {missing[0]}, which its file lacks: complete the download")
        return tensors
    if shards := shards_without_index(folder):
        return _read_headers(shards)
    raise ValueError(
        f"{folder} has no safetensors files, and only such weights can be read in parts (target.memory_budget_gib, "
        "target.stage_layers); convert them where the model fits into memory: from_pretrained(...), then save_pretrained(...)"
    )


def _read_headers(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    return {name: tensor for path in sorted(paths) for name, tensor in read_header(path).items()}


def shards_without_index(folder: Path) -> list[Path]:
    """Return the shards of a folder that lacks their index; none if it has an index or a single file.

    The headers of the shards have all that an index has. Raises ValueError if a shard is missing.
    """
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return []
    numbers = {(int(match[2]), int(match[1])) for path in folder.glob("*") if (match := SHARD.fullmatch(path.name))}
    shards = [folder / SHARD_NAME.format(number, total) for total, _ in numbers for number in range(1, total + 1)]
    if missing := sorted(path.name for path in {*shards} if not path.is_file()):
        raise ValueError(
            f"{folder} has no {INDEX_FILE}, and {missing[0]} is missing beside its other shards: complete the download"
        )
    return sorted({*shards})


@contextmanager
def with_index(name_or_path: str) -> Iterator[str]:
    """Return a folder that transformers can load, which needs an index of the shards.

    Without one, this is a folder of links to the files, beside an index made from their headers.
    """
    shards = shards_without_index(Path(name_or_path)) if Path(name_or_path).is_dir() else []
    if not shards:
        yield name_or_path
        return
    with TemporaryDirectory(prefix="outrider-") as folder:
        for path in Path(name_or_path).iterdir():
            (Path(folder) / path.name).symlink_to(path.resolve())
        index = {name: tensor.path.name for name, tensor in _read_headers(shards).items()}
        (Path(folder) / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": index}))
        yield folder


def read_index(path: Path) -> dict[str, str]:
    """Return each tensor's file name. Raises ValueError for a damaged index, and for files that are missing or elsewhere."""
    try:
        index = {name: str(Path(file)) for name, file in json.loads(path.read_bytes())["weight_map"].items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its weight_map must name a file for each tensor ({type(error).__name__}: {error})") from error
    for name in sorted(set(index.values())):
        # Also reject the separators of other systems, since an index may come from any of them.
        if name in (".", "..") or "/" in name or "\\" in name or ":" in name:
            raise ValueError(f"{path} names the file {name!r}, which may lie outside of the folder; write plain names of files")
        if not (path.parent / name).is_file():
            raise ValueError(f"{path} names {name}, which is missing; complete the download")
    return index


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Raises ValueError if the file is damaged."""
    if not path.is_file():
        raise ValueError(f"the weight file {path} is missing: complete the download")
    try:
        # The library checks the header: its length, and that all tensors fill the file without a gap.
        with safe_open(path, framework="pt"), path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def first_equal(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    """Number tensors so that those of equal values have equal numbers. The values are read."""
    numbers: dict[bytes, int] = {}
    return {tensor.name: numbers.setdefault(_content_digest(tensor), len(numbers)) for tensor in tensors}


def _content_digest(tensor: StoredTensor) -> bytes:
    digest = sha256(str(tensor.dtype).encode())
    with tensor.path.open("rb") as file:
        for start in range(tensor.offset, tensor.end, WINDOW_BYTES):
            file.seek(start)
            digest.update(file.read(min(WINDOW_BYTES, tensor.end - start)))
            drop_from_cache(tensor.path, start, WINDOW_BYTES)
    return digest.digest()


def _stored(path: Path, name: str, entry: Any, data: int) -> StoredTensor:
    first, end = entry["data_offsets"]
    if (dtype := DTYPES.get(entry["dtype"])) is None:
        raise ValueError(f"{name} has the type {entry['dtype']!r}; types that can be read are {', '.join(DTYPES)}")
    return StoredTensor(path, name, data + first, end - first, dtype, tuple(entry["shape"]))


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"the weight file {path} can't be read: {why}. Is the download complete?")


def windows(tensors: Sequence[StoredTensor], window_bytes: int = WINDOW_BYTES) -> list[FileWindow]:
    """Divide tensors into the windows in which their files are read, in the files' order.

    A window holds whole elements. It ends before an element that doesn't fit, which the next window
    begins with: so the next window may begin in the same page. Near tensors share windows.
    """
    result: list[FileWindow] = []
    path, start, end, pieces = Path(), 0, 0, list[Piece]()

    def close() -> None:
        if pieces:
            result.append(FileWindow(path, start, end - start, tuple(pieces)))
            pieces.clear()

    for index in sorted(range(len(tensors)), key=lambda index: (tensors[index].path, tensors[index].offset)):
        tensor, first = tensors[index], 0
        num_elements, size = prod(tensor.shape), tensor.dtype.itemsize
        while first < num_elements:
            position = tensor.offset + first * size
            is_near = tensor.path == path and position - end <= MAX_GAP_BYTES and position + size <= start + window_bytes
            if not pieces or not is_near:
                close()
                path, start = tensor.path, position // PAGE * PAGE
            count = min(num_elements - first, (start + window_bytes - position) // size)
            pieces.append(Piece(index, first, count, position - start))
            first, end = first + count, position + count * size
    close()
    return result
