"""An MTP head, written back into a copy of its target's checkpoint."""

import errno
import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
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


def reshard(folder, is_in):
    """Write a checkpoint of one file as files with an index; `is_in` returns the files of a tensor, the named one last."""
    weights = load_file(folder / "model.safetensors")
    files = {name: is_in(name) for name in weights}
    for file in {file for of_name in files.values() for file in of_name}:
        save_file({name: weights[name] for name in weights if file in files[name]}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: of_name[-1] for name, of_name in files.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def split(folder):
    """Write a checkpoint as two shards, as large models have them: the head is in the second."""
    reshard(folder, lambda name: [SHARDS["mtp" in name or "layers.4" in name or name == "model.norm.weight"]])


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3", "smollm3"])
def test_a_trained_head_replaces_the_earlier_one_and_nothing_else(family, shards, tmp_path):
    source, output = tmp_path / "target", tmp_path / "with_head"
    write_checkpoint(source, family)
    if shards == 2:
        split(source)
    (source / "preprocessor_config.json").write_text("{}")
    (source / "other.bin").write_bytes(b"weights of another form")
    for path in source.glob("*.safetensors"):  # the library writes them for their owner only
        path.chmod((source / "config.json").stat().st_mode)
    target = load(source)
    drafter = trained(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", target, "mtp", output)
    # 1. The files: those of the target, and each tensor in exactly one of those that the index names.
    assert json.loads((output / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (output / "preprocessor_config.json").read_text() == "{}"
    assert not (output / "other.bin").exists()
    assert len({path.stat().st_mode for path in output.iterdir()}) == 1, "who can read the target can read the copy"
    weight_map = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    stored = [(name, path.name) for path in output.glob("*.safetensors") for name in safe_open(path, "pt").keys()]  # noqa: SIM118
    assert sorted(stored) == sorted(weight_map.items())
    before = {name: tensor for path in source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    after = {name: tensor for path in output.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert before.keys() == after.keys()
    assert {name: tensor.dtype for name, tensor in before.items()} == {name: tensor.dtype for name, tensor in after.items()}
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed
    assert {weight_map[name] for name in changed} == {"model-mtp.safetensors"}
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
    before_norm = import_drafter(output, target, options={"depth": 5, "norm_output": False})
    assert (before_norm.config.depth, before_norm.config.norm_output) == (5, False)
    for other in (again, before_norm, own):
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
    narrow, scale = quantised(head.layer.self_attn.o_proj.weight.detach(), torch.ones(2, 2), torch.float8_e4m3fn, (16, 16))
    file = tmp_path / "target" / "model.safetensors"
    save_file({**load_file(file), name: narrow, f"{name}_scale_inv": scale}, file, {"format": "pt"})
    target = load(tmp_path / "target")
    target.model.config.quantization_config = {"weight_block_size": [16, 16]}
    drafter = trained(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", target, "mtp", tmp_path / "with_head", torch.bfloat16)
    tensors = load_file(tmp_path / "with_head" / "model-mtp.safetensors")
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
    with pytest.raises(ValueError, match=r"has no MTP head: .* leave mtp out of export\.formats$"):
        export_drafter(tmp_path / "drafter", target, "mtp", tmp_path / "with_head")
    assert not (tmp_path / "with_head").exists()


@pytest.mark.parametrize("form", ["the head's file holds more", "a second layer has a file of that name", "in two shards"])
def test_the_trained_head_is_in_one_file_and_the_earlier_one_in_none(form, tmp_path):
    source, output = tmp_path / "target", tmp_path / "with_head"
    write_checkpoint(source, "qwen3_5_text")
    file = source / "model.safetensors"
    second = {"mtp.layers.1.mlp.up_proj.weight": torch.ones(2, 2)}
    save_file({**load_file(file), **second}, file, {"format": "pt"})
    first, own = SHARDS[0], "model-mtp.safetensors"
    files = {
        "the head's file holds more": lambda name: [own if "mtp." in name else first],
        "a second layer has a file of that name": lambda name: [own if name in second else first],
        "in two shards": lambda name: [first, SHARDS[1]] if "mtp." in name and name not in second else [first],
    }
    reshard(source, files[form])
    target = load(source)
    drafter = trained(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", target, "mtp", output)
    stored = [name for path in output.glob("*.safetensors") for name in load_file(path)]
    assert sorted(stored) == sorted(json.loads((output / "model.safetensors.index.json").read_text())["weight_map"])
    again = import_drafter(output, target)
    assert torch.equal(again.fc.weight, drafter.fc.weight)


def test_an_earlier_exports_weights_of_other_names_are_gone(tmp_path):
    source, output = tmp_path / "target", tmp_path / "with_head"
    write_checkpoint(source, "qwen3_5_text")
    target = load(source)
    trained(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", target, "mtp", output)
    (output / "README.md").write_text("mine")
    split(source)
    export_drafter(tmp_path / "drafter", load(source), "mtp", output)
    assert {path.name for path in output.glob("*.safetensors")} == {*SHARDS[:1], "model-mtp.safetensors"} | {
        path.name for path in output.glob(SHARDS[1])
    }
    assert (output / "README.md").read_text() == "mine"


def test_numbers_that_the_checkpoints_type_cannot_hold_are_an_error(tmp_path):
    write_checkpoint(tmp_path / "target", "smollm3")
    file = tmp_path / "target" / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    target = load(tmp_path / "target", "float32")
    drafter = build_drafter(parse_drafter({"kind": "mtp"}), target)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = 1e6
    save_drafter(drafter, tmp_path / "drafter", target.identity)
    with pytest.raises(ValueError, match=r"input_proj.weight of the drafter doesn't fit into torch.float16"):
        export_drafter(tmp_path / "drafter", target, "mtp", tmp_path / "with_head")


def test_a_disk_without_room_is_an_os_error_that_keeps_the_earlier_export(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "target", "smollm3")
    target = load(tmp_path / "target")
    trained(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", target, "mtp", tmp_path / "with_head")
    before = sorted(path.name for path in (tmp_path / "with_head").iterdir())

    def full(*args: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("outrider.models.export.mtp.save_file", full)
    with pytest.raises(OSError, match="full") as caught:
        export_drafter(tmp_path / "drafter", target, "mtp", tmp_path / "with_head")
    assert caught.value.errno == errno.ENOSPC
    assert sorted(path.name for path in (tmp_path / "with_head").iterdir()) == before
