"""EAGLE-1 and EAGLE-2 as vLLM and SGLang read them, and as github.com/SafeAILab/EAGLE publishes them.

    fc.weight [H, 2H], fc.bias [H]                                  fc.{weight,bias}
    layers.0.self_attn.{q,k,v,o}_proj.weight, {q,k,v}_proj.bias     layer.self_attn.*
    layers.0.mlp.{gate,up,down}_proj.weight                         layer.mlp.*
    layers.0.post_attention_layernorm.weight                        layer.post_attention_layernorm.weight
    embed_tokens.weight, lm_head.weight                             the target's own, where they are there

There is no norm before the attention and none at the end, and no head: the target's own makes logits. The two engines differ in
`fc`: vLLM's (vllm/model_executor/models/llama_eagle.py) has no bias, SGLang's (python/sglang/srt/models/llama_eagle.py and
qwen2_eagle.py) always has one, so that zeros are written where the drafter has none. The release's may have one.
"""

from typing import Any

import torch

from ..drafters.decoder_layer import form_config
from ..drafters.eagle import Eagle, EagleConfig
from ..hf_target import HFTarget
from .folders import Folder
from .formats import Format, Layout, Reading, Tensors
from .llama import (
    LAYER_WEIGHTS,
    QKV_BIASES,
    SAME_NUMBER,
    describe,
    frequencies,
    layer_config,
    layer_problems,
    raise_refusal,
    read_config,
    require_target_parts,
    target_parts,
    write_config,
)

ROTARY = "layers.0.self_attn.rotary_emb.inv_freq"
"""Old releases hold it, though it follows from the configuration."""
PREFIX = "layers.0."


def _tensors(drafter: Eagle) -> Tensors:
    return {_their_name(name): tensor for name, tensor in drafter.state_dict().items()}


def _their_name(ours: str) -> str:
    return PREFIX + ours.removeprefix("layer.") if ours.startswith("layer.") else ours


def write_vllm(drafter: Eagle, target: HFTarget) -> Layout:
    """vLLM's variant. Raises ValueError for a drafter with a bias at `fc`, or another kind of layer."""
    problems = layer_problems(drafter, place="vLLM's EAGLE", allowed=frozenset(), kinds=("llama", "mistral"))
    tensors = _tensors(drafter)
    if "fc.bias" in tensors:
        problems.append("its fc has a bias, and vLLM's has none (train with drafter.bias=false)")
    raise_refusal(problems, VLLM.name)
    return Layout(config={"architectures": ["LlamaForCausalLM"], **write_config(drafter, target)}, tensors=tensors)


def write_sglang(drafter: Eagle, target: HFTarget) -> Layout:
    """SGLang's variant: `fc.bias` is always there, of zeros where the drafter has none."""
    is_qwen2 = layer_config(drafter).model_type == "qwen2"
    biases = frozenset(QKV_BIASES) if is_qwen2 else frozenset()
    kinds = ("llama", "mistral", "qwen2")
    raise_refusal(layer_problems(drafter, place="SGLang's EAGLE", allowed=biases, kinds=kinds), SGLANG.name)
    tensors = _tensors(drafter)
    tensors.setdefault("fc.bias", torch.zeros_like(drafter.fc.weight[:, 0]))
    config = {"architectures": ["LlamaForCausalLMEagle"], **write_config(drafter, target)}
    if is_qwen2:
        config |= {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2"}
        del config["attention_bias"], config["mlp_bias"]  # Qwen2's layers have the biases of q, k and v, and no others
    return Layout(config=config, tensors=tensors)


def read(folder: Folder, target: HFTarget) -> Reading:
    """The drafter of a folder with EAGLE-1's weights, of either engine or of the release."""
    config = _with_kind(folder)
    if config.get("bias") is not None and config["bias"] != ("fc.bias" in folder.shapes):
        raise ValueError(
            f"{folder.path} says bias {config['bias']} and {'has' if 'fc.bias' in folder.shapes else 'lacks'} fc.bias; "
            "complete the download"
        )
    layer = read_config(config, folder, target, more=frozenset({"bias", "qkv_bias"}))
    made = form_config(target, layer or {"model_type": config["model_type"]})
    may = target_parts(target, head=True) | {
        ROTARY: torch.empty(describe(made)["head_dim"] // 2, device="meta"),
        "fc.bias": torch.empty(target.hidden_size, device="meta"),
    }

    def convert(tensors: Tensors, config: EagleConfig) -> Tensors:
        require_target_parts(tensors, target, head=True, folder=folder)
        if not config.bias and "fc.bias" in tensors and tensors["fc.bias"].any():
            raise ValueError(f"{folder.path} has a fc.bias that isn't zero, and the drafter has none; export it again")
        if ROTARY in tensors and not torch.allclose(tensors[ROTARY].float(), frequencies(made), rtol=SAME_NUMBER):
            raise ValueError(f"{folder.path} has {ROTARY} of another base than its config.json says; correct rope_theta")
        return {}

    return Reading(
        kind="eagle",
        options={"bias": "fc.bias" in folder.shapes, "init": "random", "layer": layer},
        names=lambda config: {name: _their_name(name) for name in _our_names()},
        may=may,
        convert=convert,
    )


def _our_names() -> list[str]:
    return ["fc.weight", "fc.bias", *(f"layer.{name}" for name in (*LAYER_WEIGHTS, *QKV_BIASES))]


def _with_kind(folder: Folder) -> dict[str, Any]:
    """The configuration, its kind of layer told by the tensors: the release calls all of them Llamas."""
    biased = PREFIX + QKV_BIASES[0] in folder.shapes
    kind = "qwen2" if biased else "llama"
    return {**folder.config, "model_type": kind}


def is_of(folder: Folder) -> bool:
    """Told by its fusing layer, which reads two vectors, and no norm before the attention."""
    names = folder.shapes.keys()
    return {"fc.weight", PREFIX + LAYER_WEIGHTS[0]} <= names and PREFIX + "input_layernorm.weight" not in names


VLLM = Format(name="eagle1-vllm", kind="eagle", write=write_vllm, read=read, is_of=is_of)
SGLANG = Format(name="eagle1-sglang", kind="eagle", write=write_sglang, read=read, is_of=is_of)
