"""Damage to a folder of shards: each kind is found and named, and all kinds at once."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from outrider.cli.data import verify_command
from outrider.data.manifest import save_manifest
from outrider.data.shards import write_shard
from outrider.data.verify import find_damage

from .test_shards import make_examples, make_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    entries = [write_shard(tmp_path, index, make_examples(prefix=f"shard{index}")) for index in range(2)]
    save_manifest(tmp_path, make_manifest(entries))
    return tmp_path


def test_a_whole_folder_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, problems = find_damage(folder)
    assert problems == []
    assert len(manifest.shards) == 2
    verify_command(folder)
    assert "2 shards are whole: 6 examples, 46 tokens" in capsys.readouterr().out


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


SHARD, SIDECAR = "shard-00001.safetensors", "shard-00001.json"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (lambda folder: flip(folder / SHARD), f"{SHARD} was altered"),
    "a cut shard": (lambda folder: cut(folder / SHARD), f"{SHARD} is truncated"),
    "a missing shard": (lambda folder: (folder / SHARD).unlink(), f"{SHARD} is missing"),
    "a missing sidecar": (lambda folder: (folder / SIDECAR).unlink(), f"{SIDECAR} is missing"),
    "a sidecar of another shard": (lambda folder: bend(folder / SIDECAR, "num_labels", 1), f"{SIDECAR} is missing, or doesn't"),
    "a cut sidecar": (lambda folder: cut(folder / SIDECAR), f"{SIDECAR} is not a JSON file"),
    "a stray shard": (
        lambda folder: shutil.copy(folder / SHARD, folder / "shard-00002.safetensors") and None,
        "shard-00002.safetensors belongs to no shard of this distillation",
    ),
}


def bend(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named_with_a_remedy(damage: str, folder: Path) -> None:
    do_damage, message = DAMAGES[damage]
    do_damage(folder)
    _, problems = find_damage(folder)
    assert len(problems) == 1
    assert message in problems[0]
    assert any(remedy in problems[0] for remedy in ("Delete", "delete"))


def test_all_damage_is_told_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / "shard-00000.safetensors")
    cut(folder / SHARD)
    with pytest.raises(typer.Exit, match="1"):
        verify_command(folder)
    told = capsys.readouterr().err
    assert "shard-00000.safetensors was altered" in told
    assert f"{SHARD} is truncated" in told


@pytest.mark.parametrize("key", ["horizon", "max_length", "complete", "data_sha256"])
def test_an_altered_manifest_is_not_believed(key: str, folder: Path) -> None:
    path = folder / "manifest.json"
    value = json.loads(path.read_text())[key]
    bend(path, key, "0" * 64 if isinstance(value, str) else not value if isinstance(value, bool) else value + 1)
    with pytest.raises(ValueError, match=r"manifest\.json was altered"):
        find_damage(folder)


def test_shards_that_contradict_the_manifest_are_told(folder: Path) -> None:
    manifest, _ = find_damage(folder)
    save_manifest(folder, replace(manifest, horizon=4, target=replace(manifest.target, vocab_size=10)))
    _, problems = find_damage(folder)
    assert len(problems) == 2
    assert all("labels 5 tokens and not 4" in problem for problem in problems)
    save_manifest(folder, replace(manifest, target=replace(manifest.target, vocab_size=10)))
    _, problems = find_damage(folder)
    assert len(problems) == 2
    assert all("outside the target's vocabulary of 10" in problem for problem in problems)


def test_states_that_are_not_the_manifests_are_told(folder: Path) -> None:
    manifest, _ = find_damage(folder)
    save_manifest(folder, replace(manifest, features="last_hidden", feature_layers=[2]))
    _, problems = find_damage(folder)
    assert len(problems) == 2
    assert all("(False, (), None) and not (True, (2,), None)" in problem for problem in problems)


def test_an_unfinished_folder_is_checked_as_far_as_it_goes(folder: Path) -> None:
    manifest, _ = find_damage(folder)
    save_manifest(folder, replace(manifest, shards=[], complete=False))
    _, problems = find_damage(folder)
    assert len(problems) == 1
    assert "not complete (2 shards are there)" in problems[0]
    flip(folder / SHARD)
    assert any("was altered" in problem for problem in find_damage(folder)[1])


def test_an_example_in_two_shards_is_told(folder: Path) -> None:
    entries = [write_shard(folder, index, make_examples()) for index in range(2)]
    manifest = make_manifest(entries[:1])
    save_manifest(folder, replace(manifest, shards=[], complete=False))
    assert any("3 examples are there twice" in problem for problem in find_damage(folder)[1])


def test_another_target_is_told(folder: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit, match="1"):
        verify_command(folder, target=str(tiny_target_dir))
    told = capsys.readouterr().err
    assert "they are of the target 'tiny'" in told
    assert "weights_sha256" in told
    assert "tokenizer_sha256" in told
