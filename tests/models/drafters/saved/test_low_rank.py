"""Drafters as low-rank changes of others."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.data.files import sha256_file
from outrider.models.drafters import load_drafter
from outrider.models.drafters.registry import DRAFTERS
from outrider.models.drafters.saved.download import resolve_drafter
from outrider.models.drafters.saved.folder import record_weights
from outrider.models.drafters.saved.low_rank import factors, is_merged, require_shared_base, write_low_rank
from outrider.models.llm.hf_target import HFTarget

from ....commands import invoke
from .test_build import save

RANK = 2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the merged drafters of a test a folder of their own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


HUGE = {"up": (60_000, 1), "down": (1, 60_000)}


def rewrite(low_rank: Path, digest: str) -> None:
    """Record another digest of the change, as a hostile author would."""
    path = low_rank / "config.json"
    config = json.loads(path.read_text())
    config["changed"]["weights_sha256"] = digest
    path.write_text(json.dumps(config))


def is_parameter(name: str, tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not name.endswith("accuracies")


def change(base: Path, folder: Path) -> Path:
    """Write a drafter that differs from the base in all its parameters, and its change; return that folder."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    torch.manual_seed(3)
    for name, tensor in weights.items():
        if is_parameter(name, tensor):
            weights[name] = tensor + 0.1 * torch.randn_like(tensor)
        elif tensor.is_floating_point():  # shares
            weights[name] = tensor + 1e-3 * torch.rand_like(tensor)
    save_file(weights, folder / "model.safetensors")
    record_weights(folder)
    write_low_rank(folder, base, RANK, [name for name, tensor in weights.items() if is_parameter(name, tensor)])
    return folder / "low_rank"


@pytest.fixture
def base(target: HFTarget, tmp_path: Path) -> Path:
    save("redrafter", target, tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("kind", sorted(DRAFTERS))
def test_every_kind_is_read_back_from_its_change_bit_for_bit(target: HFTarget, tmp_path: Path, kind: str) -> None:
    save(kind, target, tmp_path / "base")
    low_rank = change(tmp_path / "base", tmp_path / "changed")
    whole, merged = (
        load_file(tmp_path / "changed/model.safetensors"),
        load_file(resolve_drafter(low_rank) / "model.safetensors"),
    )
    assert whole.keys() == merged.keys()
    assert all(torch.equal(whole[name], merged[name]) for name in whole)
    before = load_file(tmp_path / "base/model.safetensors")
    assert all(not torch.equal(before[name], tensor) for name, tensor in whole.items() if tensor.is_floating_point())
    of_change, of_whole = ((folder / "model.safetensors").stat().st_size for folder in (low_rank, tmp_path / "changed"))
    assert of_change < 0.6 * of_whole
    loaded = load_drafter(str(low_rank), target)
    assert type(loaded) is DRAFTERS[kind]
    assert all(torch.equal(tensor.cpu(), whole[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (3, 20, 20)])
def test_factors_are_the_nearest_of_their_rank(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    up, down = factors(matrix, 4)
    assert (up.shape[-1], down.shape[-2]) == (4, 4)
    left = torch.linalg.svdvals(matrix)[..., 4:].square().sum(-1).sqrt()
    torch.testing.assert_close(torch.linalg.matrix_norm(matrix - up @ down), left)


def test_a_change_moves_without_its_whole_drafter(base: Path, tmp_path: Path, target: HFTarget) -> None:
    low_rank = change(base, tmp_path / "changed")
    expected = load_file(tmp_path / "changed/model.safetensors")
    low_rank.rename(tmp_path / "alone")
    shutil.rmtree(tmp_path / "changed")
    assert all(
        torch.equal(tensor, expected[name])
        for name, tensor in load_file(resolve_drafter(tmp_path / "alone") / "model.safetensors").items()
    )
    # A name in a merge, too.
    load_drafter(f"{tmp_path / 'alone'}+suffix", target)


def test_a_damaged_copy_in_the_cache_is_written_again(base: Path, tmp_path: Path) -> None:
    low_rank = change(base, tmp_path / "changed")
    weights = resolve_drafter(low_rank) / "model.safetensors"
    before = sha256_file(weights)
    weights.write_bytes(weights.read_bytes()[:-4])
    assert resolve_drafter(low_rank) / "model.safetensors" == weights
    assert sha256_file(weights) == before


def test_a_cache_without_its_files_is_written_again(base: Path, tmp_path: Path) -> None:
    low_rank = change(base, tmp_path / "changed")
    whole = resolve_drafter(low_rank)
    (whole / "model.safetensors").unlink()
    resolve_drafter(low_rank)
    (whole / "config.json").write_text("{")
    assert resolve_drafter(low_rank) == whole
    assert is_merged(whole)
    assert not is_merged(base)
    assert whole.name == "changed", "tables show the name"


def test_a_base_that_was_replaced_is_found_beside_the_new_one(base: Path, tmp_path: Path, target: HFTarget) -> None:
    """`outrider adopt` keeps the earlier drafter there."""
    low_rank = change(base, tmp_path / "changed")
    expected = load_file(tmp_path / "changed/model.safetensors")
    base.rename(tmp_path / "base_earlier_1")
    save("medusa", target, base)
    assert all(
        torch.equal(tensor, expected[name])
        for name, tensor in load_file(resolve_drafter(low_rank) / "model.safetensors").items()
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("head.weight.down"), "half of one"),
        (lambda tensors: tensors.update({"head.weight.xyz": torch.ones(1)}), "half of one"),
        (lambda tensors: tensors.update({"other.up": torch.ones(9, 1), "other.down": torch.ones(1, 9)}), "no such tensor"),
        # A product that no memory could hold isn't computed.
        (lambda tensors: tensors.update({f"head.weight.{k}": torch.ones(s) for k, s in HUGE.items()}), "no such tensor"),
    ],
)
def test_tensors_that_do_not_change_the_base_are_named(base: Path, tmp_path: Path, edit: Any, message: str) -> None:
    low_rank = change(base, tmp_path / "changed")
    tensors = load_file(low_rank / "model.safetensors")
    edit(tensors)
    save_file(tensors, low_rank / "model.safetensors")
    rewrite(low_rank, sha256_file(low_rank / "model.safetensors"))
    with pytest.raises(ValueError, match=f"doesn't fit its base, {base} .*{message}"):
        resolve_drafter(low_rank)


def test_a_file_that_is_no_safetensors_is_named(base: Path, tmp_path: Path) -> None:
    low_rank = change(base, tmp_path / "changed")
    (low_rank / "model.safetensors").write_bytes(b"nothing")
    rewrite(low_rank, sha256_file(low_rank / "model.safetensors"))
    with pytest.raises(ValueError, match="doesn't fit its base"):
        resolve_drafter(low_rank)


def test_a_change_of_a_drafter_on_this_machine_is_not_pushed(base: Path, tmp_path: Path) -> None:
    low_rank = change(base, tmp_path / "changed")
    result = invoke(["push", str(low_rank), "user/name", "--dry-run"])
    assert "which others don't have: push that first" in result.message
    config = json.loads((low_rank / "config.json").read_text())
    (low_rank / "config.json").write_text(json.dumps({**config, "base": "user/base@abc"}))
    require_shared_base(low_rank)
    require_shared_base(base)


def test_what_does_not_fit_together_is_an_error_that_names_both(base: Path, tmp_path: Path) -> None:
    low_rank = change(base, tmp_path / "changed")
    remedy = re.escape(f'If that has moved, set "base" in {low_rank / "config.json"}')
    # 1. The base is another drafter now, or isn't there.
    content = load_file(base / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in content.items()}, base / "model.safetensors")
    record_weights(base)
    with pytest.raises(ValueError, match=rf"low_rank changes the drafter {base}: the weights there are others.*{remedy}"):
        resolve_drafter(low_rank)
    base.rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=rf"low_rank changes the drafter {base}: it can't be read .*holds no drafter.*{remedy}"
    ):
        resolve_drafter(low_rank)
    # 2. The remedy helps.
    save_file(content, tmp_path / "moved/model.safetensors")
    record_weights(tmp_path / "moved")
    config = low_rank / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base": str(tmp_path / "moved")}))
    resolve_drafter(low_rank)
    # 3. The change itself is damaged, or of a later version.
    weights = low_rank / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-4] + b"abcd")
    with pytest.raises(ValueError, match=r"low_rank/model\.safetensors is missing, altered or damaged.*copy it again"):
        resolve_drafter(low_rank)
    weights.write_bytes(data)
    config.write_text(json.dumps({**json.loads(config.read_text()), "low_rank_version": 9}))
    with pytest.raises(ValueError, match=r"has format 9, and this version of outrider reads 1"):
        resolve_drafter(low_rank)
