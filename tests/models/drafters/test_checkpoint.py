"""Drafter checkpoints: what goes out comes back, and nothing else gets in."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from outrider.models.drafters import build_drafter, load_drafter, save_drafter


@pytest.fixture
def saved(target, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    drafter = build_drafter({"kind": "redrafter", "draft_vocab_size": 8, "head_rank": 4}, target)
    drafter.choose_draft_vocabulary(torch.arange(target.vocab_size))
    save_drafter(drafter, tmp_path / "drafter", target.identity)
    return tmp_path / "drafter"


def test_weights_config_and_vocabulary_come_back(target, saved):
    drafter = load_drafter(saved, target)
    tensors = safetensors.torch.load_file(saved / "model.safetensors")
    assert set(drafter.state_dict()) == set(tensors)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, tensors[name].to(tensor.dtype)), name
    assert drafter.draft_tokens.tolist() == list(range(292, 300))
    assert not drafter.training
    assert not any(p.requires_grad for p in drafter.parameters())
    assert next(drafter.parameters()).dtype == target.dtype


def test_beams_may_change_at_load_time_and_weights_may_not(target, saved):
    assert load_drafter(saved, target, beam_width=7).config.beam_width == 7
    with pytest.raises(ValueError, match="num_blocks can't be changed"):
        load_drafter(saved, target, num_blocks=3)


def test_no_path_of_the_machine_is_published(target, saved):
    assert str(saved.parents[1]) not in (saved / "config.json").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("input.bias"), "missing input.bias"),
        (lambda t: t.update(extra=torch.zeros(1)), "unknown extra"),
        (lambda t: t.update({"input.bias": torch.zeros(3)}), r"input.bias is \(3,\), not \(32,\)"),
    ],
)
def test_missing_unknown_and_misshapen_tensors_are_named(target, saved, change, message):
    tensors = safetensors.torch.load_file(saved / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, saved / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_drafter(saved, target)


def test_a_cut_weight_file_is_an_error_not_a_drafter(target, saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="damaged"):
        load_drafter(saved, target)
    path.unlink()
    with pytest.raises(ValueError, match="missing"):
        load_drafter(saved, target)


@pytest.mark.parametrize("key", ["format_version", "kind", "drafter", "target"])
def test_every_key_of_the_config_is_required(target, saved, key):
    config = json.loads((saved / "config.json").read_text())
    del config[key]
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"missing keys {key}"):
        load_drafter(saved, target)


def test_unknown_keys_are_errors_at_every_level(target, saved):
    original = (saved / "config.json").read_text()
    num_checked = 0
    for place in ((), ("drafter",), ("target",)):
        config = json.loads(original)
        inner = config
        for key in place:
            inner = inner[key]
        inner["surprise"] = 1
        (saved / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="surprise"):
            load_drafter(saved, target)
        num_checked += 1
    assert num_checked == 3


def test_a_drafter_of_another_target_is_refused_with_the_differences(target, saved):
    drafter = load_drafter(saved, target)
    other = replace(target.identity, hidden_size=64, tokenizer_sha256="0" * 64)
    shutil.rmtree(saved)
    save_drafter(drafter, saved, other)
    with pytest.raises(ValueError, match=r"hidden_size: 64 for the drafter, 32 for this target; tokenizer_sha256"):
        load_drafter(saved, target)


def test_a_folder_without_a_drafter_says_which_folder_is_wanted(target, tmp_path):
    with pytest.raises(ValueError, match="finished training"):
        load_drafter(tmp_path, target)
