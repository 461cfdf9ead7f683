"""Damage to a folder of shards: every kind is detected and named, also several at once."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.cli.data import VerifyOptions, verify_command
from outrider.data.shards import label_store, write_shard

from .test_shards import flip_one_bit, make_examples, make_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    entries = [write_shard(tmp_path, index, make_examples(prefix=f"shard{index}")) for index in range(2)]
    label_store(tmp_path).save(make_manifest(entries))
    return tmp_path


def test_an_undamaged_folder_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, problems = label_store(folder).find_damage()
    assert problems == []
    assert len(manifest.shards) == 2
    verify_command(VerifyOptions(directory=folder))
    assert "2 shards are whole: 6 examples, 46 tokens" in capsys.readouterr().out


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


SHARD, SIDECAR = "shard-00001.safetensors", "shard-00001.json"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing sidecar": (lambda folder: (folder / SIDECAR).unlink(), f"{SIDECAR} is missing"),
    "an altered sidecar": (lambda folder: bend(folder / SIDECAR, "num_labels", 1), f"{SIDECAR} is missing, or differs"),
    "a sidecar of another shard": (
        lambda folder: shutil.copy(folder / "shard-00000.json", folder / SIDECAR) and None,
        f"{SIDECAR} is missing, or differs",
    ),
    "a cut sidecar": (lambda folder: cut(folder / SIDECAR), f"{SIDECAR} is not a JSON file"),
    "a stray shard": (
        lambda folder: shutil.copy(folder / SHARD, folder / "shard-00002.safetensors") and None,
        "shard-00002.safetensors belongs to no shard of this run",
    ),
}


def bend(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named_with_a_remedy(damage: str, folder: Path) -> None:
    do_damage, message = DAMAGES[damage]
    do_damage(folder)
    _, problems = label_store(folder).find_damage()
    assert len(problems) == 1
    assert message in problems[0]
    assert any(remedy in problems[0] for remedy in ("Delete", "delete"))


def test_all_damage_is_reported_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_one_bit(folder / "shard-00000.safetensors")
    cut(folder / SHARD)
    with pytest.raises(SystemExit, match="1"):
        verify_command(VerifyOptions(directory=folder))
    errors = capsys.readouterr().err
    assert "shard-00000.safetensors was truncated or altered" in errors
    assert f"{SHARD} was truncated or altered" in errors


def test_the_finished_part_of_an_unfinished_folder_is_checked(folder: Path) -> None:
    manifest, _ = label_store(folder).find_damage()
    label_store(folder).save(replace(manifest, shards=[], complete=False))
    _, problems = label_store(folder).find_damage()
    assert len(problems) == 1
    assert "not complete (2 shards are there)" in problems[0]
    flip_one_bit(folder / SHARD)
    assert any("was truncated or altered" in problem for problem in label_store(folder).find_damage()[1])


def test_shards_of_another_target_are_reported(folder: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        verify_command(VerifyOptions(directory=folder, target=str(tiny_target_dir)))
    errors = capsys.readouterr().err
    assert "the data is of the target 'tiny'" in errors
    assert "weights_sha256" in errors
    assert "tokenizer_sha256" in errors
