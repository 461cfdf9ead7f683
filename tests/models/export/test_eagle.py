"""EAGLE-1 and EAGLE-3 formats, against tables of engines; test_published.py reads drafters of others."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.export import eagle1, eagle3
from outrider.models.export.formats import read_folder, write_folder
from outrider.models.export.registry import import_drafter

H, V, DRAFT, KV, MLP = 32, 300, 40, 16, 48

# Parameters of vLLM's EagleLlamaForCausalLM (vllm/model_executor/models/llama_eagle.py of 0.33.0).
# `fc` has no bias. The loader adds the prefix `model.` to names, and an unknown name is an error.
# Embeddings and head are the target's.
VLLM_EAGLE1 = {
    "fc.weight": (H, 2 * H),
    "layers.0.self_attn.q_proj.weight": (H, H),
    "layers.0.self_attn.k_proj.weight": (KV, H),
    "layers.0.self_attn.v_proj.weight": (KV, H),
    "layers.0.self_attn.o_proj.weight": (H, H),
    "layers.0.mlp.gate_proj.weight": (MLP, H),
    "layers.0.mlp.up_proj.weight": (MLP, H),
    "layers.0.mlp.down_proj.weight": (H, MLP),
    "layers.0.post_attention_layernorm.weight": (H,),
}
# SGLang's LlamaForCausalLMEagle (python/sglang/srt/models/llama_eagle.py of 0.5.23) has the same
# parameters, and `fc` always has a bias.
SGLANG_EAGLE1 = VLLM_EAGLE1 | {"fc.bias": (H,)}
# In its Qwen2ForCausalLMEagle (qwen2_eagle.py), q, k and v have biases, as in Qwen2.
SGLANG_QWEN2 = SGLANG_EAGLE1 | {
    "layers.0.self_attn.q_proj.bias": (H,),
    "layers.0.self_attn.k_proj.bias": (KV,),
    "layers.0.self_attn.v_proj.bias": (KV,),
}
# Parameters of vLLM's Eagle3LlamaForCausalLM (llama_eagle3.py of 0.33.0), which renames `midlayer.`
# to `layers.0.` and ignores t2d; and of SGLang's LlamaForCausalLMEagle3 (llama_eagle3.py of
# 0.5.23). In both, d2t plus the index of an output is the target's token. TensorRT-LLM has the
# same parameters except t2d (modeling_speculative.py of b35ac1b), and no d2t for a whole
# vocabulary; it takes a configuration with draft_vocab_size for one of EAGLE-3, whose registered
# class is "EAGLE3" + architecture without "Eagle3" (modeling_auto.py of 01bffee).
EAGLE3 = {
    "fc.weight": (H, 3 * H),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.post_attention_layernorm.weight": (H,),
    "midlayer.self_attn.q_proj.weight": (H, 2 * H),
    "midlayer.self_attn.k_proj.weight": (KV, 2 * H),
    "midlayer.self_attn.v_proj.weight": (KV, 2 * H),
    "midlayer.self_attn.o_proj.weight": (H, H),
    "midlayer.mlp.gate_proj.weight": (MLP, H),
    "midlayer.mlp.up_proj.weight": (MLP, H),
    "midlayer.mlp.down_proj.weight": (H, MLP),
    "norm.weight": (H,),
    "lm_head.weight": (DRAFT, H),
    "d2t": (DRAFT,),
    "t2d": (V,),
}
# The same with the norms of EAGLE-3.1. In both engines, norm i is that of the i-th layer's features.
EAGLE31 = EAGLE3 | {f"fc_norm.{index}.weight": (H,) for index in range(3)}
# Keys of a Llama's configuration from which these loaders build the layer, with their defaults.
# Both read `rope_theta` and `rope_scaling` through transformers' LlamaConfig; its versions 4 and 5
# know these names.
CONFIG = {
    "hidden_size": H,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "vocab_size": V,
    "torch_dtype": "float32",
}
LLAMA = {"model_type": "llama", **CONFIG}
QWEN2 = {key: value for key, value in CONFIG.items() if key not in ("attention_bias", "mlp_bias")} | {"model_type": "qwen2"}


def written(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((path / "config.json").read_text()), safetensors.torch.load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "format", "options", "config", "table"),
    [
        ("llama", eagle1.VLLM, {"bias": False}, {**LLAMA, "architectures": ["LlamaForCausalLM"]}, VLLM_EAGLE1),
        ("llama", eagle1.SGLANG, {"bias": False}, {**LLAMA, "architectures": ["LlamaForCausalLMEagle"]}, SGLANG_EAGLE1),
        ("qwen2", eagle1.SGLANG, {"bias": True}, {**QWEN2, "architectures": ["Qwen2ForCausalLMEagle"]}, SGLANG_QWEN2),
        (
            "llama",
            eagle3.FORMAT,
            {"draft_vocab_size": DRAFT},
            {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT},
            EAGLE3,
        ),
        (
            "llama",
            eagle3.FORMAT,
            {"draft_vocab_size": DRAFT, "fc_norm": True, "norm_output": True},
            {
                **LLAMA,
                "architectures": ["LlamaForCausalLMEagle3"],
                "draft_vocab_size": DRAFT,
                "fc_norm": True,
                "norm_output": True,
            },
            EAGLE31,
        ),
    ],
)
def test_names_shapes_and_keys_are_those_that_the_engines_read(
    family, format, options, config, table, make_target, make_drafter, tmp_path
):
    target = make_target(family)
    drafter = make_drafter(format.kind, target, **options)
    write_folder(format, drafter, tmp_path / "a", target)
    exported, tensors = written(tmp_path / "a")
    assert exported == config
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == table
    whole = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(tensor.dtype == whole.get(name, torch.float32) for name, tensor in tensors.items())
    if format is eagle3.FORMAT:
        tokens = torch.arange(DRAFT) + tensors["d2t"]
        assert tokens.tolist() == drafter.draft_tokens.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
        assert tensors["d2t"].any()
    elif not options.get("bias", False) and "fc.bias" in tensors:
        assert not tensors["fc.bias"].any()
    again = read_folder(format, tmp_path / "a", target)
    assert again.config == drafter.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())


def test_scaled_rotary_embeddings_are_exported_as_the_engines_read_them(make_target, make_drafter, tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    target = make_target(rope_parameters=rope)
    write_folder(eagle3.FORMAT, make_drafter("eagle3", target), tmp_path / "a", target)
    exported, _ = written(tmp_path / "a")
    assert exported["rope_theta"] == 500000.0
    assert exported["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    (tmp_path / "a" / "outrider.json").unlink()
    assert import_drafter(tmp_path / "a", target).config.layer is None, "it is the target's own kind"


@pytest.mark.parametrize(
    ("family", "format", "options", "message"),
    [
        ("llama", eagle1.VLLM, {"bias": True}, r"its fc has a bias, but vLLM's has none \(train with drafter.bias=false\)"),
        ("qwen2", eagle1.VLLM, {"bias": False}, r"its layer is qwen2's.*train with 'drafter.layer={model_type: llama}'"),
        ("qwen3", eagle1.SGLANG, {}, r"its layer is qwen3's"),
        ("qwen3", eagle3.FORMAT, {}, r"its layer is qwen3's"),
        ("qwen2", eagle3.SPECULATORS, {}, r"its layer is qwen2's"),
        (
            "llama",
            eagle3.FORMAT,
            {"feature_layers": [1, 2, 3]},
            r"layers \[1, 2, 3\], but vLLM and SGLang agree on",
        ),
        (
            "llama",
            eagle3.SPECULATORS,
            {"feature_layers": [1, 2]},
            "it reads 2 of the target's layers, but vLLM always provides 3",
        ),
        (
            "llama",
            eagle3.SPECULATORS,
            {"feature_layers": [4, 1, 2]},
            r"layers in the order \[4, 1, 2\], but vLLM in ascending order \(train with drafter.feature_layers=\[1, 2, 4\]\)",
        ),
        (
            "llama",
            eagle3.FORMAT,
            {"layer": {"model_type": "llama", "attention_bias": True}},
            "self_attn.k_proj.bias",
        ),
        ("llama", eagle3.FORMAT, {"layer": {"model_type": "llama", "hidden_act": "gelu"}}, "activation is gelu"),
    ],
)
def test_a_drafter_that_the_engines_cannot_load_is_an_error_with_the_remedy(
    family, format, options, message, make_target, make_drafter, tmp_path
):
    target = make_target(family)
    drafter = make_drafter(format.kind, target, **{"init": "random", **options})
    with pytest.raises(ValueError, match=message):
        write_folder(format, drafter, tmp_path / "a", target)
    assert not (tmp_path / "a").exists()


def test_a_drafter_without_a_chosen_vocabulary_is_not_exported(llama, tmp_path):
    with pytest.raises(ValueError, match="vocabulary hasn't been chosen"):
        write_folder(
            eagle3.FORMAT, build_drafter(parse_drafter({"kind": "eagle3", "draft_vocab_size": 9}), llama), tmp_path / "a", llama
        )


# --- tensors that the formats omit: an import restores these and no others


def test_a_drafter_of_the_whole_vocabulary_has_no_maps(llama, make_drafter, tmp_path):
    """vLLM has no parameter `d2t` if the head has all tokens, and its loader fails on it."""
    drafter = make_drafter("eagle3", llama)
    write_folder(eagle3.FORMAT, drafter, tmp_path / "a", llama)
    config, tensors = written(tmp_path / "a")
    assert config["draft_vocab_size"] == config["vocab_size"] == V
    assert tensors.keys() == EAGLE3.keys() - {"d2t", "t2d"}
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
