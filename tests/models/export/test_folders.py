"""Folders from other sources: no code in them runs, and no file outside of them is read."""

import json
import os
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from outrider.models.drafters.saved.folder import shape_problems
from outrider.models.export.folders import open_folder

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor([1, 2])}


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"x": 1}')
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def with_index(path: Path, weight_map: dict[str, str]) -> Path:
    folder(path)
    safetensors.torch.save_file({"a": TENSORS["a"]}, path / "one.safetensors")
    safetensors.torch.save_file({name: TENSORS[name] for name in "bc"}, path / "two.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def assert_holds(path: Path) -> None:
    opened = open_folder(path)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in opened.shapes.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in TENSORS.items()
    }
    assert all(tensor.is_meta for tensor in opened.shapes.values())
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in opened.load().items())
    assert opened.config == {"x": 1}


def test_names_and_shapes_are_known_before_weights_are_read(tmp_path):
    safetensors.torch.save_file(TENSORS, folder(tmp_path / "a") / "model.safetensors")
    torch.save(TENSORS, folder(tmp_path / "b") / "pytorch_model.bin")
    with_index(tmp_path / "c", {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    for name in "abc":
        assert_holds(tmp_path / name)


def test_files_in_torchs_old_format_are_an_error(tmp_path):
    """Before torch 1.6, a small file could allocate gigabytes before shapes are known."""
    torch.save(TENSORS, folder(tmp_path) / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="not a plain file of tensors as torch writes since 1.6"):
        open_folder(tmp_path)


class Hostile:
    def __reduce__(self):
        return os.mkdir, (str(Path(os.environ["HOSTILE"]) / "run"),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_pickle_is_an_error_and_not_executed(tmp_path, monkeypatch, zipped):
    monkeypatch.setenv("HOSTILE", str(tmp_path))
    path = folder(tmp_path / "a")
    torch.save({"a": Hostile()}, path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="not a plain file of tensors .*Reading anything else could run"):
        open_folder(path)
    assert not (tmp_path / "run").exists()
    torch.load(path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "run").exists(), "this file was not hostile"


@pytest.mark.parametrize("content", [[1, 2], {"a": {"nested": 1.0}}, torch.ones(2)])
def test_a_file_without_named_tensors_is_an_error(tmp_path, content):
    torch.save(content, folder(tmp_path / "a") / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds something else than named tensors"):
        open_folder(tmp_path / "a")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret", "..", "", "sub/one.safetensors", "..\\x", "C:x"])
def test_an_index_that_names_a_file_outside_of_its_folder_is_an_error(tmp_path, name):
    safetensors.torch.save_file(TENSORS, tmp_path / "secret.safetensors")
    with_index(tmp_path / "a", {"a": name})
    with pytest.raises(ValueError, match="may lie outside of the folder"):
        open_folder(tmp_path / "a")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "b": "three.safetensors"}, "names three.safetensors, which is missing"),
        ({"a": 1}, "must name a file for each tensor"),
        ([], "must name a file for each tensor"),
    ],
)
def test_an_index_that_contradicts_its_files_is_an_error(tmp_path, weight_map, message):
    with_index(tmp_path / "a", weight_map)
    with pytest.raises(ValueError, match=message):
        open_folder(tmp_path / "a")


def test_a_tensor_in_two_files_is_an_error(tmp_path):
    with_index(tmp_path / "a", {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    safetensors.torch.save_file({name: TENSORS[name] for name in "abc"}, tmp_path / "a" / "two.safetensors")
    with pytest.raises(ValueError, match="in two files"):
        open_folder(tmp_path / "a")


def test_an_unsupported_dtype_is_named(tmp_path):
    header = b'{"a":{"dtype":"U16","shape":[1],"data_offsets":[0,2]}}'
    folder(tmp_path / "a", model__safetensors=len(header).to_bytes(8, "little") + header + b"\0\0")
    shapes = open_folder(tmp_path / "a").shapes
    assert shape_problems(shapes, {"a": torch.empty(1)}) == ["a is of torch.uint16, not torch.float32"]


def test_damaged_and_empty_folders_are_errors_that_name_the_problem(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        open_folder(tmp_path)
    with pytest.raises(ValueError, match=r"has no model.safetensors or pytorch_model.bin beside its config.json, but nothing"):
        open_folder(folder(tmp_path / "a"))
    with pytest.raises(ValueError, match="is damaged"):
        open_folder(folder(tmp_path / "b", model__safetensors=b"\x08\0\0\0\0\0\0\0{}"))
    with pytest.raises(ValueError, match="not a plain file of tensors"):
        open_folder(folder(tmp_path / "c", pytorch_model__bin=b"PK\3\4 cut"))
    (tmp_path / "c" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a configuration but a list"):
        open_folder(tmp_path / "c")
    safetensors.torch.save_file({"a": torch.tensor([1.0, float("nan")])}, folder(tmp_path / "d") / "model.safetensors")
    with pytest.raises(ValueError, match="a holds numbers that aren't finite"):
        open_folder(tmp_path / "d").load()


def test_a_compressed_file_is_an_error_before_it_is_decompressed(tmp_path):
    torch.save({"a": torch.zeros(1000)}, tmp_path / "plain.bin")
    path = folder(tmp_path / "a") / "pytorch_model.bin"
    with zipfile.ZipFile(tmp_path / "plain.bin") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for member in plain.infolist():
            packed.writestr(member.filename, plain.read(member), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="it is compressed, unlike files that torch writes"):
        open_folder(tmp_path / "a")


def test_a_changed_byte_is_detected_by_the_checksum(tmp_path):
    path = folder(tmp_path / "a") / "pytorch_model.bin"
    torch.save({"a": torch.full((1000,), 7.0)}, path)
    content = path.read_bytes()
    position = content.index(b"\0\0\xe0\x40" * 8)  # the weights, whose checksum torch doesn't check
    path.write_bytes(content[:position] + b"\1" + content[position + 1 :])
    assert torch.load(path, weights_only=True)["a"][0] != 7.0
    with pytest.raises(ValueError, match="not a plain file of tensors .* is damaged"):
        open_folder(tmp_path / "a")


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_tensors_without_plain_numbers_are_refused(tmp_path, tensor):
    torch.save({"a": tensor}, folder(tmp_path / "a") / "pytorch_model.bin")
    with pytest.raises(ValueError, match="has a without plain numbers|not a plain file of tensors"):
        open_folder(tmp_path / "a").load()


def test_tensors_in_8_bits_are_checked_for_nan(tmp_path):
    wrong = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    safetensors.torch.save_file({"a": wrong}, folder(tmp_path / "a") / "model.safetensors")
    with pytest.raises(ValueError, match="a holds numbers that aren't finite"):
        open_folder(tmp_path / "a").load()
