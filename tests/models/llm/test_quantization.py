"""Targets that torchao quantises while they are loaded, and early errors where it cannot."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.llm import config as target_config
from outrider.models.llm import linears
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

pytest.importorskip("torchao")  # pip install 'outrider[quantization]'

INT8 = {"method": "torchao", "type": "Int8WeightOnlyConfig"}


def load(directory: Path, options: Any) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(directory), dtype="float32", quantization=options), torch.device("cpu"))


@pytest.fixture(scope="module")
def plain(tiny_target_dir: Path) -> HFTarget:
    return load(tiny_target_dir, None)


@pytest.fixture(scope="module")
def int8(tiny_target_dir: Path) -> HFTarget:
    return load(tiny_target_dir, INT8)


def test_the_layers_are_in_8_bits_with_nearly_equal_logits(plain: HFTarget, int8: HFTarget) -> None:
    from torchao.quantization import Int8Tensor

    quantized = [name for name, parameter in int8.model.named_parameters() if isinstance(parameter.data, Int8Tensor)]
    assert len(quantized) == 2 * 7, "all projections of both layers"
    assert int8.is_quantized
    assert not plain.is_quantized
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        left, right = int8.model(ids).logits, plain.model(ids).logits
    error = float((left - right).norm() / right.norm())
    assert 1e-4 < error < 0.1


def test_a_quantized_target_is_another_target(plain: HFTarget, int8: HFTarget) -> None:
    differences = plain.identity.differences(int8.identity)
    assert len(differences) == 1
    assert differences[0].startswith("quantization (was '', is '{")
    assert int8.identity.quantization == json.dumps(INT8, sort_keys=True)


def test_tree_decoding_gives_the_quantized_targets_tokens(int8: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = torch.arange(3, 20)[None]
    options: dict[str, Any] = {"max_new_tokens": 12, "stop_ids": ()}

    def answer(drafter: Any) -> list[int]:
        return [token for step in generate(int8, drafter, GreedyAcceptance(), prompt, **options) for token in step.tokens[0]]

    plainly = answer(NullDrafter())
    assert len(plainly) == 12
    drafter = build_drafter(parse_drafter({"kind": "redrafter", "exit_width": 16}), int8).eval()
    assert answer(drafter) == plainly
    monkeypatch.setattr(linears, "MIN_ELEMENTS", 1)
    with linears.packed_where_faster(int8.model):
        assert answer(drafter) == plainly
    assert [layer.linear for layer in linears._linears([int8.model])] == [int8.head], "the head alone is in 32 bits"


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "draft_model"])
def test_a_drafter_that_would_start_from_quantized_layers_is_an_error(kind: str, int8: HFTarget) -> None:
    start = {"init": "target_layers", "num_layers": 1} if kind == "draft_model" else {}
    with pytest.raises(ValueError, match=r"quantised.*drafter\.init=random"):
        build_drafter(parse_drafter({"kind": kind, **start}), int8)
    build_drafter(parse_drafter({"kind": kind, "init": "random"}), int8)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "draft_model"])
def test_a_drafter_trained_from_the_targets_layers_loads_for_the_quantized_target(kind, plain, int8, tmp_path):
    start = {"init": "target_layers", "num_layers": 1} if kind == "draft_model" else {"init": "target"}
    trained = build_drafter(parse_drafter({"kind": kind, **start}), plain)
    save_drafter(trained, tmp_path, plain.identity)
    loaded = load_drafter(tmp_path, int8)
    assert loaded.config == trained.config
    theirs = loaded.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in trained.state_dict().items())


@pytest.mark.parametrize(
    ("method", "names"),
    [("bitsandbytes", "bitsandbytes"), ("torchao", "torchao"), ("gptq", "gptqmodel optimum"), ("awq", "gptqmodel")],
)
def test_a_missing_package_is_an_error_with_its_command_before_loading(method, names, tiny_target_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(target_config, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"quantised by {method} .*pip install {names}$"):
        load(tiny_target_dir, {"method": method})
    stored = shutil.copytree(tiny_target_dir, tmp_path / "stored")
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    (stored / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ValueError, match=f"quantised by {method} .*pip install {names}$"):
        load(stored, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs a method of bitsandbytes, torchao, gptq, awq"),
        ({"method": "magic"}, "needs a method of"),
        ({"method": "torchao"}, "type is None; name a configuration of torchao"),
        ({"method": "torchao", "type": "quantize_"}, "type is 'quantize_'"),
        ({**INT8, "bits": 3}, "quantization has bits; Int8WeightOnlyConfig takes "),
    ],
)
def test_unknown_options_of_quantization_are_named(options: Any, words: str, tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load(tiny_target_dir, options)
