"""Published configurations, key for key, with the sizes of the tests' target.

An import that fails on one of their keys could read none of the published drafters.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from outrider.models.export.registry import format_of, import_drafter

H, V, DRAFT, MLP, CONTEXT = 32, 300, 40, 40, 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": MLP,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": V,
}
"""Keys that all of them have."""
RELEASE = {**LLAMA, "max_position_embeddings": CONTEXT, "pad_token_id": 0, "transformers_version": "4.28.1"}
SPECFORGE = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "draft_vocab_size": DRAFT,
    "max_position_embeddings": CONTEXT,
    "num_key_value_heads": 2,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
}
QWEN = {"max_window_layers": 48, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False}

EAGLE1 = {
    # github.com/SafeAILab/EAGLE: train/vicuna_7B_config.json
    "vicuna_7b": RELEASE,
    # eagle/train/vicuna_33B_config.json
    "vicuna_33b": {
        **{key: value for key, value in RELEASE.items() if key != "max_position_embeddings"},
        "max_sequence_length": CONTEXT,
        "num_key_value_heads": 2,
        "transformers_version": "4.28.0.dev0",
    },
    # eagle/train/llama_2_chat_70B_config.json
    "llama2_70b": {
        **{key: value for key, value in RELEASE.items() if key != "pad_token_id"},
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "transformers_version": "4.31.0.dev0",
    },
    # eagle/train/EAGLE-LLaMA3-Instruct-8B.json
    "llama3_8b": {**RELEASE, "num_key_value_heads": 2, "rope_theta": 500000.0, "bias": False},
}
OPTIMIZER_NESTED = {
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "next_layer_regular": True,
    "parallel_draft_heads_num_layers": 1,
    "parallel_draft_step": 1,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
EAGLE3 = {
    # github.com/SafeAILab/EAGLE: eagle/traineagle3/config.json
    "release": {**RELEASE, "num_key_value_heads": 2, "draft_vocab_size": DRAFT},
    # github.com/sgl-project/SpecForge: configs/qwen3-32b-eagle3.json
    "qwen3_32b": {**SPECFORGE, **QWEN, "head_dim": 16, "transformers_version": "4.51.0"},
    # configs/qwen2.5-7b-eagle3.json; its target doesn't use the sliding window
    "qwen2_5_7b": {**SPECFORGE, **QWEN, "sliding_window": 16, "transformers_version": "4.51.0"},
    # configs/kimi-k2-eagle3.json
    "kimi_k2": {
        **SPECFORGE,
        **QWEN,
        "head_dim": 16,
        "model_type": "kimi_k2",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "use_aux_hidden_state": True},
    },
    # configs/phi4-mini-eagle3.json
    "phi4_mini": {**SPECFORGE, "model_type": "phi3", "pad_token_id": 2, "tie_word_embeddings": True},
    # the same kind of configuration as exported by SpecForge 0.2.0 with transformers 5.8.1
    "specforges_exporter": {
        **{key: value for key, value in {**SPECFORGE, **QWEN}.items() if key not in ("torch_dtype", "rope_scaling")},
        "dtype": "bfloat16",
        "head_dim": 16,
        "mlp_bias": False,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    },
    # configs/qwen3-30B-A3B-eagle3.1.json
    "eagle3_1": {**SPECFORGE, **QWEN, "head_dim": 16, "fc_norm": True, "norm_output": True},
    # NVIDIA's Model Optimizer 0.47.0: modelopt/torch/export/plugins/hf_spec_configs.py
    "model_optimizer": {
        **SPECFORGE,
        "head_dim": 16,
        "mlp_bias": False,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "eagle_config": OPTIMIZER_NESTED,
    },
}


def publish(path: Path, config: dict[str, Any], *, is_eagle3: bool, prefix: str, safe: bool) -> dict[str, torch.Tensor]:
    """Write a folder with this configuration and random tensors; return the tensors by name."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim", H // heads)
    read = 2 * H if is_eagle3 else H
    shapes = {
        "self_attn.q_proj.weight": (heads * head_dim, read),
        "self_attn.k_proj.weight": (kv_heads * head_dim, read),
        "self_attn.v_proj.weight": (kv_heads * head_dim, read),
        "self_attn.o_proj.weight": (H, heads * head_dim),
        "mlp.gate_proj.weight": (MLP, H),
        "mlp.up_proj.weight": (MLP, H),
        "mlp.down_proj.weight": (H, MLP),
        "post_attention_layernorm.weight": (H,),
    }
    if is_eagle3:
        shapes |= {"hidden_norm.weight": (H,), "input_layernorm.weight": (H,)}
    other_shapes = (
        {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (DRAFT, H)} if is_eagle3 else {"fc.weight": (H, 2 * H)}
    )
    if not is_eagle3 and config.get("bias", True):
        other_shapes["fc.bias"] = (H,)
    if config.get("fc_norm") is True:
        other_shapes |= {f"fc_norm.{index}.weight": (H,) for index in range(3)}
    named = {f"{prefix}.{name}": shape for name, shape in shapes.items()} | other_shapes
    tensors = {name: 0.3 * torch.randn(shape, generator=generator).half() for name, shape in named.items()}
    if is_eagle3:
        drafted = torch.randperm(V, generator=generator)[:DRAFT].sort().values
        tensors["d2t"] = drafted - torch.arange(DRAFT)
        if prefix == "midlayer":  # the Model Optimizer doesn't write it
            tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, drafted, True)
    path.mkdir()
    if safe:
        safetensors.torch.save_file(tensors, path / "model.safetensors")
    else:
        torch.save(tensors, path / "pytorch_model.bin")
    (path / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("name", EAGLE1)
def test_eagle1_with_the_keys_of_its_release_is_read(name, llama, tmp_path):
    config = EAGLE1[name]
    tensors = publish(tmp_path / "a", config, is_eagle3=False, prefix="layers.0", safe=False)
    assert format_of(tmp_path / "a").kind == "eagle"
    drafter = import_drafter(tmp_path / "a", llama)
    layer = drafter.config.layer
    assert drafter.config.bias == ("bias" not in config)
    assert layer["num_key_value_heads"] == config.get("num_key_value_heads", 4)
    assert layer["rope_parameters"]["rope_theta"] == config.get("rope_theta", 10000.0)
    assert layer["rms_norm_eps"] == 1e-05
    ours = {key.replace("layer.", "layers.0."): tensor for key, tensor in drafter.state_dict().items()}
    assert ours.keys() == tensors.keys()
    assert all(torch.equal(ours[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_with_the_keys_that_others_write_is_read(name, llama, tmp_path):
    config = EAGLE3[name]
    prefix = "layers.0" if name == "model_optimizer" else "midlayer"
    tensors = publish(tmp_path / "a", config, is_eagle3=True, prefix=prefix, safe=name != "release")
    assert format_of(tmp_path / "a").name == "eagle3"
    drafter = import_drafter(tmp_path / "a", llama)
    assert drafter.feature_layers == (2, 3, 4)
    layer = drafter.config.layer
    assert (layer["model_type"], layer["num_key_value_heads"], layer["head_dim"]) == ("llama", 2, config.get("head_dim", 8))
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    assert drafter.draft_tokens.tolist() == (torch.arange(DRAFT) + tensors["d2t"]).tolist()
    loaded = drafter.state_dict()
    theirs = {f"{prefix}.hidden_norm.weight": "hidden_norm.weight"}
    named = {key: theirs.get(key, key.replace(prefix, "layer")) for key in tensors if key not in ("d2t", "t2d")}
    assert loaded.keys() == {*named.values(), "draft_tokens"}
    assert all(torch.equal(loaded[ours], tensors[key]) for key, ours in named.items())


def test_feature_layers_may_be_given_where_the_configuration_is_ambiguous(llama, tmp_path):
    """SGLang adds 1 to a configuration's layers and vLLM doesn't; the file names no engine."""
    publish(tmp_path / "a", EAGLE3["kimi_k2"], is_eagle3=True, prefix="midlayer", safe=True)
    assert import_drafter(tmp_path / "a", llama, options={"feature_layers": [3, 4, 5]}).feature_layers == (3, 4, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_aux_norm": True}, "an unknown key use_aux_norm"),
        ({"fc_norm": "true"}, "has fc_norm 'true'; it must be true or false"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc are both true"),
        ({"attention_bias": True}, "describes a drafter that isn't supported: it has attention_bias True"),
        ({"use_sliding_window": True, "sliding_window": 16}, "sliding_window 16, use_sliding_window True"),
        ({"sliding_window": 16}, "it has sliding_window 16"),
        ({"eagle_config": {**OPTIMIZER_NESTED, "parallel_draft_step": 4}}, "has parallel_draft_step 4"),
        ({"eagle_config": {**OPTIMIZER_NESTED, "use_last_layernorm": False}}, "has use_last_layernorm False"),
        ({"eagle_config": {**OPTIMIZER_NESTED, "use_mtp_layernorm": True}}, "has use_mtp_layernorm True"),
    ],
)
def test_keys_of_another_architecture_are_named(change, message, llama, tmp_path):
    publish(tmp_path / "a", {**SPECFORGE, **change}, is_eagle3=True, prefix="midlayer", safe=True)
    with pytest.raises(ValueError, match=message):
        import_drafter(tmp_path / "a", llama)
