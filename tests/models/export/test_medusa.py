"""Medusa formats, against the reference's forward pass and published configurations."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from outrider.models.drafters import load_drafter, save_drafter
from outrider.models.export.formats import write_folder
from outrider.models.export.medusa import REFERENCE, TENSORRT
from outrider.models.export.registry import format_of, import_drafter

H, V = 32, 300


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(x))


def reference(num_heads: int, num_layers: int) -> nn.ModuleList:
    """Build the heads as medusa/model/medusa_model.py of the release does (commit 11af0aa).

    Names and order are the release's, for one block. The release loads `medusa_lm_head.pt` into
    such heads, and ignores missing and unknown tensors.
    """
    return nn.ModuleList(
        nn.Sequential(*(Block() for _ in range(num_layers)), nn.Linear(H, V, bias=False)) for _ in range(num_heads)
    )


def assert_same_logits(drafter: Any, heads: nn.ModuleList) -> None:
    hidden = torch.randn(5, H, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = torch.stack([head(hidden) for head in heads], dim=1)
        assert torch.allclose(drafter.logits(hidden), expected, atol=1e-5)


def test_the_reference_loads_the_export_with_equal_logits(llama, make_drafter, tmp_path):
    drafter = make_drafter("medusa", llama, num_heads=3)
    write_folder(REFERENCE, drafter, tmp_path / "a", llama)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": llama.hidden_size,
        "vocab_size": llama.vocab_size,
        "medusa_fc_bias": True,
        "medusa_num_heads": 3,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "org/tiny",
        "torch_dtype": "float32",
    }
    heads = reference(3, 1)
    heads.load_state_dict(torch.load(tmp_path / "a" / "medusa_lm_head.pt", weights_only=True), strict=True)
    assert_same_logits(drafter, heads)


def test_tensorrts_conversion_finds_its_names_in_the_export(llama, make_drafter, tmp_path):
    """It reads these tensors of `medusa_lm_head.safetensors`.

    The number of heads is an argument or in its configuration. Sources: `load_medusa_hf` in
    tensorrt_llm/models/llama/convert.py and `MedusaConfig.from_hugging_face`, versions up to 1.1.
    """
    drafter = make_drafter("medusa", llama, num_heads=2, num_layers=2)
    write_folder(TENSORRT, drafter, tmp_path / "a", llama)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["num_medusa_heads"], config["medusa_num_layers"]) == (2, 2)
    tensors = safetensors.torch.load_file(tmp_path / "a" / "medusa_lm_head.safetensors")
    expected = {}
    for head in range(2):
        for layer in range(2):
            expected |= {f"{head}.{layer}.linear.weight": (H, H), f"{head}.{layer}.linear.bias": (H,)}
        expected[f"{head}.2.weight"] = (V, H)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    heads = reference(2, 2)
    heads.load_state_dict(tensors, strict=True)
    assert_same_logits(drafter, heads)


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        (REFERENCE, {"head_rank": 4}, "share an output layer of rank 4.*train with drafter.head_rank=null"),
        (REFERENCE, {"num_layers": 2}, "its heads have 2 blocks each.*or export for TensorRT-LLM"),
        (TENSORRT, {"share_head": True}, "share the target's output layer.*train with drafter.share_head=false"),
    ],
)
def test_heads_that_the_formats_cannot_hold_are_an_error(format, options, message, llama, make_drafter, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_folder(format, make_drafter("medusa", llama, **options), tmp_path / "a", llama)
    assert not (tmp_path / "a").exists()


def test_heads_without_output_layers_have_no_keys_of_vllm(llama, make_drafter, tmp_path, caplog):
    write_folder(REFERENCE, make_drafter("medusa", llama, num_heads=2, share_head=True), tmp_path / "a", llama)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["version"] == "2"
    assert not config.keys() & {"model_type", "hidden_size", "vocab_size", "medusa_fc_bias"}
    assert "is not for vLLM" in caplog.text


def release(path: Path, heads: nn.ModuleList, *, prefix: str = "", file: str = "medusa_lm_head.pt", **config: Any) -> None:
    path.mkdir()
    tensors = {prefix + name: tensor.detach() for name, tensor in heads.state_dict().items()}
    torch.save(tensors, path / file) if file.endswith(".pt") else safetensors.torch.save_file(tensors, path / file)
    stored_config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "transformers_version": "4.31.0", **config}
    (path / "config.json").write_text(json.dumps(stored_config))


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa_of_the_release_is_imported(prefix, file, llama, tmp_path):
    heads = reference(4, 1)
    release(tmp_path / "a", heads, prefix=prefix, file=file, medusa_num_heads=4, medusa_num_layers=1)
    assert format_of(tmp_path / "a").name == "medusa"
    save_drafter(import_drafter(tmp_path / "a", llama, options={"tree_nodes": 5}), tmp_path / "ours", llama.identity)
    drafter = load_drafter(tmp_path / "ours", llama)
    assert (drafter.config.num_heads, drafter.config.tree_nodes, drafter.config.share_head) == (4, 5, False)
    assert_same_logits(drafter, heads)


def test_heads_beside_other_weights_are_read(llama, tmp_path):
    heads = reference(2, 1)
    release(tmp_path / "a", heads, medusa_num_heads=2, medusa_num_layers=1)
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "a" / "model.safetensors")
    assert format_of(tmp_path / "a").name == "medusa"
    assert_same_logits(import_drafter(tmp_path / "a", llama), heads)


def test_all_heads_are_read_if_the_configuration_has_a_wrong_count(llama, tmp_path):
    heads = reference(5, 1)
    release(tmp_path / "a", heads, medusa_num_heads=2, medusa_num_layers=1)
    drafter = import_drafter(tmp_path / "a", llama)
    assert_same_logits(drafter, heads)


def test_the_later_layout_shares_the_targets_head(llama, tmp_path):
    blocks = nn.ModuleList(nn.Sequential(Block()) for _ in range(3))
    release(tmp_path / "a", blocks, medusa_num_heads=3, medusa_num_layers=1, version="2")
    drafter = import_drafter(tmp_path / "a", llama)
    assert drafter.config.share_head
    assert_same_logits(drafter, nn.ModuleList(nn.Sequential(*block, llama.head) for block in blocks))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"medusa_num_layers": 2}, "has 1 blocks in a head, but its config.json has medusa_num_layers 2"),
        ({"medusa_num_heads": "4"}, "medusa_num_heads=.4.: must be a whole number"),
        ({"version": "2"}, "unknown 0.1.weight"),
    ],
)
def test_a_configuration_that_contradicts_the_heads_is_an_error(config, message, llama, tmp_path):
    release(tmp_path / "a", reference(2, 1), **{"medusa_num_heads": 2, "medusa_num_layers": 1, **config})
    with pytest.raises(ValueError, match=message):
        import_drafter(tmp_path / "a", llama)
