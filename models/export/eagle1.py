"""EAGLE-1 and EAGLE-2 in the formats of vLLM, SGLang and github.com/SafeAILab/EAGLE.

    fc.weight [H, 2H], fc.bias [H]                                  fc.{weight,bias}
    layers.0.self_attn.{q,k,v,o}_proj.weight, {q,k,v}_proj.bias     layer.self_attn.*
    layers.0.mlp.{gate,up,down}_proj.weight                         layer.mlp.*
    layers.0.post_attention_layernorm.weight                        layer.post_attention_layernorm.weight
    embed_tokens.weight, lm_head.weight                             the target's own, where they are there

There is no norm before the attention, no final norm and no head: the target's head computes the
logits. The engines differ in `fc`. In vLLM (vllm/model_executor/models/llama_eagle.py) it has no
bias. In SGLang (python/sglang/srt/models/llama_eagle.py and qwen2_eagle.py) it always has one, so
we write zeros for a drafter without a bias. In the release it may have one.
"""

from functools import partial
from typing import Any

import torch
from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS
from ..drafters.decoder_layer import form_config
from ..drafters.eagle import Eagle
from ..drafters.options import EagleConfig
from ..llm.hf_target import HFTarget
from .folders import Folder
from .formats import FolderContents, Format, Reading, Tensors
from .llama import (
    LAYER_WEIGHTS,
    QKV_BIASES,
    LayerKeys,
    describe,
    layer_problems,
    raise_unsupported,
    read_keys,
    read_layers,
    require_target_parts,
    target_parts,
    write_config,
)

ROTARY = "layers.0.self_attn.rotary_emb.inv_freq"
"""Tensor in old releases; the configuration determines it anyway."""
PREFIX = "layers.0."
LAYER_TENSORS = (*LAYER_WEIGHTS, *QKV_BIASES)


@dataclass(kw_only=True, config=OPTIONS)
class EagleKeys(LayerKeys):
    """Keys of a `config.json`."""

    bias: bool | None = None
    qkv_bias: Any = None


def _tensors(drafter: Eagle) -> Tensors:
    return {_exported_name(name): tensor for name, tensor in drafter.state_dict().items()}


def _exported_name(ours: str) -> str:
    return PREFIX + ours.removeprefix("layer.") if ours.startswith("layer.") else ours


def write_vllm(drafter: Eagle, target: HFTarget) -> FolderContents:
    """Build the contents of a folder for vLLM.

    Raises ValueError for a drafter whose `fc` has a bias other than zero, or with another kind of
    layer.
    """
    problems = layer_problems(drafter.layer, target, engine="vLLM's EAGLE", allowed=frozenset(), kinds=("llama", "mistral"))
    tensors = _tensors(drafter)
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bias.any():
        problems.append("its fc has a bias, but vLLM's has none (train with drafter.bias=false)")
    raise_unsupported(problems, VLLM.name)
    return FolderContents(
        config={"architectures": ["LlamaForCausalLM"], **write_config(drafter.layer, target)}, tensors=tensors
    )


def write_sglang(drafter: Eagle, target: HFTarget) -> FolderContents:
    """Build the contents of a folder for SGLang; `fc.bias` is zeros if the drafter has none."""
    is_qwen2 = drafter.layer.self_attn.config.model_type == "qwen2"
    biases = frozenset(QKV_BIASES) if is_qwen2 else frozenset()
    kinds = ("llama", "mistral", "qwen2")
    problems = layer_problems(drafter.layer, target, engine="SGLang's EAGLE", allowed=biases, kinds=kinds)
    raise_unsupported(problems, SGLANG.name)
    tensors = _tensors(drafter)
    tensors.setdefault("fc.bias", torch.zeros_like(drafter.fc.weight[:, 0]))
    config = {"architectures": ["LlamaForCausalLMEagle"], **write_config(drafter.layer, target)}
    if is_qwen2:
        config |= {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2"}
        del config["attention_bias"], config["mlp_bias"]  # Qwen2's layers always have biases of q, k and v only
    return FolderContents(config=config, tensors=tensors)


def read(folder: Folder, target: HFTarget, *, lacks_zeros: bool = False) -> Reading:
    """Describe how to read a folder with EAGLE-1's weights, from an engine or the release.

    With `lacks_zeros` a drafter whose export left out a bias of zeros gets the zeros back.
    """
    # 1. Check the configuration.
    config, has_bias = _with_kind(folder), "fc.bias" in folder.shapes
    keys = read_keys(EagleKeys, config, folder)
    if keys.bias is not None and keys.bias != has_bias:
        raise ValueError(
            f"{folder.path} has bias {keys.bias} in config.json, but fc.bias is {'there' if has_bias else 'missing'}; "
            "complete the download"
        )
    layer = read_layers(keys, folder, target)
    model_config = form_config(target, layer or {"model_type": config["model_type"]})

    # 2. Describe the tensors.
    optional = target_parts(target, head=True) | {
        ROTARY: torch.empty(describe(model_config)["head_dim"] // 2, device="meta"),
        "fc.bias": torch.empty(target.hidden_size, device="meta"),
    }

    def convert(tensors: Tensors, config: EagleConfig) -> Tensors:
        require_target_parts(tensors, target, head=True, folder=folder)
        if not config.bias and has_bias and tensors["fc.bias"].any():
            raise ValueError(f"{folder.path} has an fc.bias that isn't zero, but the drafter has none; export it again")
        return {"fc.bias": torch.zeros_like(tensors["fc.weight"][:, 0])} if config.bias and lacks_zeros else {}

    lacks_zeros = lacks_zeros and not has_bias
    names = ("fc.weight", *([] if lacks_zeros else ["fc.bias"]), *(f"layer.{tensor}" for tensor in LAYER_TENSORS))
    return Reading(
        options={"bias": has_bias, "init": "random", "layer": layer},
        rename=lambda config: {name: _exported_name(name) for name in names},
        optional=optional,
        convert=convert,
    )


def _with_kind(folder: Folder) -> dict[str, Any]:
    """Set the configuration's kind of layer by the tensors.

    The release calls all layers Llamas.
    """
    if PREFIX + QKV_BIASES[0] not in folder.shapes:
        return {**folder.config, "model_type": "llama"}
    return {name: value for name, value in folder.config.items() if name != "attention_bias"} | {"model_type": "qwen2"}


def is_of(folder: Folder) -> bool:
    """Check for the fusing layer with two inputs, and for a missing norm before the attention."""
    names = folder.shapes.keys()
    return {"fc.weight", PREFIX + LAYER_WEIGHTS[0]} <= names and PREFIX + "input_layernorm.weight" not in names


VLLM = Format(name="eagle1-vllm", kind="eagle", write=write_vllm, read=partial(read, lacks_zeros=True), is_of=is_of)
SGLANG = Format(name="eagle1-sglang", kind="eagle", write=write_sglang, read=read, is_of=is_of)
