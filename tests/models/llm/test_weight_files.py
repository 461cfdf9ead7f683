"""Headers of safetensors files, damaged ones, and the windows in which files are read."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.models.llm.weight_files import PAGE, Piece, StoredTensor, read_folder, read_header, windows


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(first: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


def test_the_header_gives_the_bytes_of_every_tensor(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(2, 2).half(),
        "d": torch.tensor(3.0),
        "e": torch.randint(0, 9, (4,)),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    stored, content = read_header(tmp_path / "x.safetensors"), (tmp_path / "x.safetensors").read_bytes()
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry_of = stored[name]
        actual = torch.frombuffer(bytearray(content[entry_of.offset : entry_of.end]), dtype=entry_of.dtype).view(entry_of.shape)
        assert actual.dtype == tensor.dtype
        assert torch.equal(actual, tensor), name


@pytest.mark.parametrize(
    ("header", "data", "length", "why"),
    [
        (b"{}", b"", 10**13, "header too large"),
        (b"{nonsense", b"", None, "invalid JSON in header"),
        ({"a": {"dtype": "F32"}}, b"", None, "missing field"),
        ({"a": entry(0, 8, [4], "U16")}, b"x" * 8, None, "a has the type 'U16'; types that can be read"),
        ({"a": entry(0, 8, [2])}, b"x" * 7, None, "incomplete metadata"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"x" * 12, None, "invalid offset"),
        ({"a": entry(0, 8, [3])}, b"x" * 8, None, "invalid shape"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, header, data, length, why):
    with pytest.raises(ValueError, match=f"(?s)x.safetensors can't be read: .*{why}"):
        read_header(write(tmp_path / "x.safetensors", header, data, length))


def test_an_empty_file_is_damaged_and_a_missing_one_is_missing(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="x.safetensors can't be read"):
        read_header(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="y.safetensors is missing: complete the download"):
        read_header(tmp_path / "y.safetensors")


def test_a_folder_is_read_by_its_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {name: stored.path.name for name, stored in read_folder(tmp_path).items()} == index["weight_map"]
    index["weight_map"]["c"] = "model-2.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names c, which its file lacks"):
        read_folder(tmp_path)


def test_pickled_weights_are_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no safetensors files.*target.memory_budget_gib.*save_pretrained"):
        read_folder(tmp_path)


def stored(offset: int, count: int, dtype: torch.dtype = torch.float32, path: str = "x") -> StoredTensor:
    return StoredTensor(Path(path), "t", offset, count * dtype.itemsize, dtype, (count,))


def test_windows_begin_at_pages_and_near_tensors_share_them() -> None:
    tensors = [stored(5000, 10), stored(100, 5), stored(5040, 2, path="y")]
    first, second = windows(tensors)
    assert (first.path, first.start, first.num_bytes) == (Path("x"), 0, 5040)
    assert first.pieces == (Piece(1, 0, 5, 100), Piece(0, 0, 10, 5000))
    assert (second.path, second.start, second.pieces) == (Path("y"), PAGE, (Piece(2, 0, 2, 5040 - PAGE),))


def test_tensors_far_apart_are_read_alone() -> None:
    assert [window.start // PAGE for window in windows([stored(0, 1), stored(100 * PAGE * 64, 1)])] == [0, 6400]


@pytest.mark.parametrize("offset", [0, 8, 13, PAGE - 3, PAGE + 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_element_is_in_one_window_also_at_odd_addresses(offset: int, dtype: torch.dtype) -> None:
    """An element across the end of a window would be read in halves."""
    tensors = [stored(offset, 3000, dtype), stored(offset + 3000 * dtype.itemsize + 1, 5000, dtype)]
    visited: dict[int, list[int]] = {0: [], 1: []}
    for window in windows(tensors, window_bytes=2 * PAGE):
        assert window.start % PAGE == 0
        assert window.num_bytes <= 2 * PAGE
        for piece in window.pieces:
            assert window.start + piece.position == tensors[piece.tensor].offset + piece.first * dtype.itemsize
            assert piece.position + piece.count * dtype.itemsize <= window.num_bytes
            visited[piece.tensor] += range(piece.first, piece.first + piece.count)
    assert visited == {0: [*range(3000)], 1: [*range(5000)]}


def test_an_empty_tensor_needs_no_window() -> None:
    assert windows([stored(8, 0)]) == []
