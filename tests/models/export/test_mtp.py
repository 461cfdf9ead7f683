"""An MTP head, written back into a copy of its target's checkpoint."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.drafters.mtp_weights import quantised
from outrider.models.export.registry import export_drafter, format_of, import_drafter

from ..mtp_checkpoints import load, write_checkpoint

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def trained(folder, target, seed=3):
    """Save a head like the target's own, with other weights, and return it."""
    drafter = build_drafter(parse_drafter({"kind": "mtp", "depth": 2}), target)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_drafter(drafter, folder, target.identity)
    return drafter


def split(folder):
    """Write a checkpoint of one file as two shards, as large models have them: the head is in the second."""
    weights = load_file(folder / "model.safetensors")
    in_second = {name for name in weights if "mtp" in name or "layers.4" in name or name == "model.norm.weight"}
    weight_map = {name: SHARDS[name in in_second] for name in weights}
    for shard in SHARDS:
        save_file({name: weights[name] for name in weights if weight_map[name] == shard}, folder / shard, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3", "smollm3"])
def test_a_trained_head_replaces_the_earlier_one_and_nothing_else(family, shards, tmp_path):
    source, output = tmp_path / "target", tmp_path / "with_head"
    write_checkpoint(source, family)
    if shards == 2:
        split(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "other.bin").write_bytes(b"weights of another form")
    target = load(source)
    drafter = trained(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", target, "mtp", output)
    # 1. The files: those of the target, and each tensor in exactly one of those that the index names.
    assert json.loads((output / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (output / "tokenizer.json").read_text() == "{}"
    assert not (output / "other.bin").exists()
    weight_map = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    stored = [(name, path.name) for path in output.glob("*.safetensors") for name in safe_open(path, "pt").keys()]  # noqa: SIM118
    assert sorted(stored) == sorted(weight_map.items())
    before = {name: tensor for path in source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    after = {name: tensor for path in output.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert before.keys() == after.keys()
    assert {name: tensor.dtype for name, tensor in before.items()} == {name: tensor.dtype for name, tensor in after.items()}
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed
    assert {weight_map[name] for name in changed} == {"mtp.safetensors"}
    assert not (output / "model.safetensors").exists(), "it would hide the index"
    if shards == 2:
        assert (output / SHARDS[0]).samefile(source / SHARDS[0])
    # 2. The head is read again as the same drafter, with the target or from the copy.
    assert format_of(output).name == "mtp"
    again = import_drafter(output, target)
    assert again.config == drafter.config
    (output / "outrider.json").unlink()
    assert format_of(output).name == "mtp"
    own = build_drafter(parse_drafter({"kind": "mtp"}), load(output))
    for other in (again, import_drafter(output, target, options={"depth": 5}), own):
        assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in other.state_dict().items())
    # 3. A later head replaces this one.
    later = trained(tmp_path / "later", target, seed=4)
    with pytest.raises(ValueError, match="holds other files already"):
        export_drafter(tmp_path / "later", target, "mtp", output)
    export_drafter(tmp_path / "later", load(output), "mtp", tmp_path / "again")
    assert torch.equal(import_drafter(tmp_path / "again", target).fc.weight, later.fc.weight)


def test_a_head_in_8_bit_floats_is_written_in_its_form(tmp_path):
    head = write_checkpoint(tmp_path / "target", "deepseek_v3")
    name = "model.layers.4.self_attn.o_proj.weight"
    narrow, scale = quantised(head.layer.self_attn.o_proj.weight.detach(), torch.ones(2, 2), torch.float8_e4m3fn)
    file = tmp_path / "target" / "model.safetensors"
    save_file({**load_file(file), name: narrow, f"{name}_scale_inv": scale}, file, {"format": "pt"})
    target = load(tmp_path / "target")
    drafter = trained(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", target, "mtp", tmp_path / "with_head", torch.bfloat16)
    tensors = load_file(tmp_path / "with_head" / "mtp.safetensors")
    assert tensors[name].dtype is torch.float8_e4m3fn
    assert tensors[f"{name}_scale_inv"].dtype is torch.float32
    assert tensors["model.layers.4.eh_proj.weight"].dtype is torch.float64, "the type of the checkpoint"
    weight = drafter.layer.self_attn.o_proj.weight
    error = import_drafter(tmp_path / "with_head", target).layer.self_attn.o_proj.weight - weight
    assert 0 < error.norm() < 0.04 * weight.norm()


def test_a_target_without_a_head_has_no_place_for_one(tmp_path):
    write_checkpoint(tmp_path / "target", "smollm3", with_head=False)
    target = load(tmp_path / "target")
    drafter = build_drafter(parse_drafter({"kind": "mtp", "init": "random"}), target)
    save_drafter(drafter, tmp_path / "drafter", target.identity)
    with pytest.raises(ValueError, match="has no MTP head"):
        export_drafter(tmp_path / "drafter", target, "mtp", tmp_path / "with_head")
    assert not (tmp_path / "with_head").exists()
