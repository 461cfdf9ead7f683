"""Tensors that the EAGLE formats omit: an import restores these and no other tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from outrider.models.export import eagle1, eagle3
from outrider.models.export.formats import read_folder, write_folder
from outrider.models.export.registry import import_drafter

V = 300


def written(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((path / "config.json").read_text()), safetensors.torch.load_file(path / "model.safetensors")


def test_a_drafter_of_the_whole_vocabulary_has_no_maps(llama, make_drafter, tmp_path):
    """vLLM has no parameter `d2t` if the head has all tokens, and its loader fails on it."""
    drafter = make_drafter("eagle3", llama)
    write_folder(eagle3.FORMAT, drafter, tmp_path / "a", llama)
    config, tensors = written(tmp_path / "a")
    assert config["draft_vocab_size"] == config["vocab_size"] == V
    assert tensors.keys().isdisjoint({"d2t", "t2d"})
    again = read_folder(eagle3.FORMAT, tmp_path / "a", llama)
    assert again.config == drafter.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    whole = {
        "d2t": torch.zeros(V, dtype=torch.long),
        "t2d": torch.ones(V, dtype=torch.bool),
    }  # other exporters write them in this case too
    safetensors.torch.save_file(tensors | whole, tmp_path / "a" / "model.safetensors")
    assert import_drafter(tmp_path / "a", llama).config == drafter.config


def test_a_bias_of_zeros_is_omitted_and_restored(llama, make_drafter, tmp_path):
    """Training may leave a bias at zero.

    Without `outrider.json` the imported drafter has no bias.
    """
    drafter = make_drafter("eagle", llama, bias=True)
    drafter.fc.bias.zero_()
    write_folder(eagle1.VLLM, drafter, tmp_path / "a", llama)
    _, tensors = written(tmp_path / "a")
    assert "fc.bias" not in tensors
    again = import_drafter(tmp_path / "a", llama)
    assert again.config == drafter.config
    assert again.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    (tmp_path / "a" / "outrider.json").unlink()
    assert not import_drafter(tmp_path / "a", llama).config.bias


def test_a_missing_bias_that_the_format_requires_is_an_error(llama, make_drafter, tmp_path):
    write_folder(eagle1.SGLANG, make_drafter("eagle", llama, bias=True), tmp_path / "a", llama)
    _, tensors = written(tmp_path / "a")
    del tensors["fc.bias"]
    safetensors.torch.save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(ValueError, match="missing fc.bias"):
        import_drafter(tmp_path / "a", llama)
