"""EAGLE drafters of others: published configurations, key for key, with the sizes of the tests' target.

An import that fails on one of their keys could read none of the published drafters.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from outrider.models.drafters import load_drafter, save_drafter
from outrider.models.export import eagle3
from outrider.models.export.formats import write_folder
from outrider.models.export.registry import format_of, import_drafter

H, V, DRAFT, CONTEXT = 32, 300, 40, 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": 40,
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
OWN_LAYER = {
    **RELEASE,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
}
"""An EAGLE-1 whose layer has the form of the tests' target."""
OWN_EAGLE3 = {**OWN_LAYER, "draft_vocab_size": DRAFT}


def publish(
    path: Path, config: dict[str, Any], *, prefix: str = "midlayer", safe: bool = False, **changes: Any
) -> dict[str, torch.Tensor]:
    """Write a folder with random tensors of this configuration; return the tensors by name.

    `changes` are made in the file of the configuration only; "absent" removes a key. `prefix` is that
    of EAGLE-3's layer.
    """
    generator = torch.Generator().manual_seed(0)
    is_eagle3, mlp = "draft_vocab_size" in config, config["intermediate_size"]
    prefix = prefix if is_eagle3 else "layers.0"
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim", H // heads)
    read = 2 * H if is_eagle3 else H
    shapes = {
        "self_attn.q_proj.weight": (heads * head_dim, read),
        "self_attn.k_proj.weight": (kv_heads * head_dim, read),
        "self_attn.v_proj.weight": (kv_heads * head_dim, read),
        "self_attn.o_proj.weight": (H, heads * head_dim),
        "mlp.gate_proj.weight": (mlp, H),
        "mlp.up_proj.weight": (mlp, H),
        "mlp.down_proj.weight": (H, mlp),
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
        resave(path, tensors)
    stored_config = {key: value for key, value in {**config, **changes}.items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(stored_config))
    return tensors


def resave(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, path / "pytorch_model.bin")


def imported_name(name: str) -> str:
    """Return our name for a tensor of a drafter."""
    ours = re.sub(r"^(midlayer|layers\.0)\.", "layer.", name)
    return ours.removeprefix("layer.") if "hidden_norm" in ours else ours


@pytest.mark.parametrize("name", EAGLE1)
def test_eagle1_with_the_keys_of_its_release_is_read(name, llama, tmp_path):
    config = EAGLE1[name]
    tensors = publish(tmp_path / "a", config)
    assert format_of(tmp_path / "a").kind == "eagle"
    drafter = import_drafter(tmp_path / "a", llama)
    layer = drafter.config.layer
    assert drafter.config.bias == ("bias" not in config)
    assert layer["num_key_value_heads"] == config.get("num_key_value_heads", 4)
    assert layer["rope_parameters"]["rope_theta"] == config.get("rope_theta", 10000.0)
    assert layer["rms_norm_eps"] == 1e-05
    ours = drafter.state_dict()
    assert ours.keys() == {imported_name(key) for key in tensors}
    assert all(torch.equal(ours[imported_name(key)], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_with_the_keys_that_others_write_is_read(name, llama, tmp_path):
    config = EAGLE3[name]
    prefix = "layers.0" if name == "model_optimizer" else "midlayer"
    tensors = publish(tmp_path / "a", config, prefix=prefix, safe=name != "release")
    assert format_of(tmp_path / "a").name == "eagle3"
    drafter = import_drafter(tmp_path / "a", llama)
    assert drafter.feature_layers == (2, 3, 4)
    layer = drafter.config.layer
    assert (layer["model_type"], layer["num_key_value_heads"], layer["head_dim"]) == ("llama", 2, config.get("head_dim", 8))
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    assert drafter.draft_tokens.tolist() == (torch.arange(DRAFT) + tensors["d2t"]).tolist()
    loaded = drafter.state_dict()
    named = {key: imported_name(key) for key in tensors if key not in ("d2t", "t2d")}
    assert loaded.keys() == {*named.values(), "draft_tokens"}
    assert all(torch.equal(loaded[ours], tensors[key]) for key, ours in named.items())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parts", [(), ("embed_tokens",), ("embed_tokens", "lm_head", "inv_freq")])
def test_eagle1_of_the_release_is_imported(bias, parts, llama, tmp_path):
    tensors = publish(tmp_path / "a", {**OWN_LAYER, "bias": bias})
    extras = {
        "embed_tokens": {"embed_tokens.weight": llama.embed_tokens.weight.half()},
        "lm_head": {"lm_head.weight": llama.head.weight.bfloat16()},
        "inv_freq": {"layers.0.self_attn.rotary_emb.inv_freq": 1 / 50000 ** (torch.arange(0, 8, 2) / 8)},
    }
    resave(tmp_path / "a", tensors | {name: tensor for part in parts for name, tensor in extras[part].items()})
    assert format_of(tmp_path / "a").kind == "eagle"
    drafter = import_drafter(tmp_path / "a", llama, options={"depth": 3})
    assert (drafter.config.bias, drafter.config.layer, drafter.config.depth) == (bias, None, 3)
    assert drafter.fc.weight.dtype == torch.float16
    save_drafter(drafter, tmp_path / "ours", llama.identity)
    ours = load_drafter(tmp_path / "ours", llama).state_dict()
    assert ours.keys() == {imported_name(name) for name in tensors}
    assert all(torch.equal(ours[imported_name(name)], tensor.float()) for name, tensor in tensors.items())


def test_a_published_eagle3_keeps_its_own_rotary_base_and_tokens_in_a_later_export(llama, tmp_path):
    """Without rope_theta in the configuration, the rotary base is transformers' default."""
    tensors = publish(tmp_path / "a", EAGLE3["release"])
    drafter = import_drafter(tmp_path / "a", llama, options={"depth": 3})
    assert torch.allclose(drafter.own_rotary.inv_freq, 1 / 10000 ** (torch.arange(0, 8, 2) / 8))
    save_drafter(drafter, tmp_path / "ours", llama.identity)
    write_folder(eagle3.FORMAT, load_drafter(tmp_path / "ours", llama), tmp_path / "again", llama)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    again = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")
    assert (config["rope_theta"], config["draft_vocab_size"]) == (10000.0, DRAFT)
    assert all(torch.equal(tensor, again[name].to(tensor.dtype)) for name, tensor in tensors.items())


def test_a_llama_layer_for_a_qwen3_target_stays_a_llama_layer(make_target, tmp_path):
    """Nearly all published drafters for Qwen3 have a Llama layer."""
    target = make_target("qwen3")
    publish(tmp_path / "a", OWN_EAGLE3)
    drafter = import_drafter(tmp_path / "a", target)
    assert drafter.config.layer["model_type"] == "llama"
    assert not hasattr(drafter.layer.self_attn, "q_norm")


@pytest.mark.parametrize("layers", [[2, 3, 4], [1, 2, 3]])
def test_feature_layers_follow_both_engines_numbering_or_the_option(layers, llama, tmp_path):
    publish(tmp_path / "a", OWN_EAGLE3, eagle_aux_hidden_state_layer_ids=layers)
    assert import_drafter(tmp_path / "a", llama).feature_layers == (2, 3, 4)
    publish(tmp_path / "b", OWN_EAGLE3)
    assert import_drafter(tmp_path / "b", llama, options={"feature_layers": [0, 1, 5]}).feature_layers == (0, 1, 5)


def test_tensors_that_contradict_the_target_or_each_other_are_an_error(llama, tmp_path):
    tensors = publish(tmp_path / "a", OWN_EAGLE3)
    other = llama.embed_tokens.weight.flip(0).clone()
    drafted = torch.zeros(V, dtype=torch.bool)
    drafted[:DRAFT] = True
    for change, message in [
        ({"embed_tokens.weight": other}, "has embed_tokens.weight that differs"),
        ({"t2d": drafted}, "d2t and a t2d with different tokens"),
        ({"d2t": torch.full((DRAFT,), V), "t2d": drafted}, "a t2d with different tokens"),
    ]:
        resave(tmp_path / "a", {**tensors, **change})
        with pytest.raises(ValueError, match=message):
            import_drafter(tmp_path / "a", llama)
    publish(tmp_path / "c", {**OWN_LAYER, "bias": False}, bias=True)
    with pytest.raises(ValueError, match="has bias True in config.json, but fc.bias is missing"):
        import_drafter(tmp_path / "c", llama)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, the target's 32"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"norm_before_residual": True}, "norm_before_residual=true: must be False"),
        ({"fc_norm": True}, "missing fc_norm.0.weight; missing fc_norm.1.weight; missing fc_norm.2.weight"),
        ({"norm_before_fc": True}, "missing input_norm.weight"),
        ({"draft_vocab_size": 301}, "draft_vocab_size 301; it must be from 1 to the target's 300"),
        ({"draft_vocab_size": 39}, r"d2t is \(40,\), not \(39,\); lm_head.weight is \(40, 32\)"),
        ({"intermediate_size": 10**12}, "intermediate_size=1000000000000: must be below"),
        ({"num_attention_heads": "4"}, 'num_attention_heads="4": must be a whole number'),
        ({"rope_scaling": {"rope_type": "nonsense"}}, "rotary embeddings of the kind 'nonsense' .* must equal"),
        ({"rope_scaling": {"rope_type": "linear"}}, "doesn't describe a valid layer .*factor"),
        ({"rope_theta": 10**30}, "rope_theta=1000"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rotary embeddings with factor 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rotary embeddings with factor '2'"),
        ({"rope_scaling": {"full_attention": {"rope_type": "linear", "factor": 2}}}, "rotary embeddings with full_attention {"),
        ({"rope_theta": 10.0, "rope_parameters": {"rope_theta": 20.0}}, "rotary embeddings that are given twice, and differ"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
            "rotary embeddings that are given twice, and differ",
        ),
        ({"num_attention_heads": None}, "num_attention_heads: is missing"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, "option feature_layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state=false: must be True"),
        ({"eagle_config": {"stray": 1}}, "eagle_config.stray: there is no such key"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=NaN: must be a finite number"),
        ({"hidden_act": "exec"}, "hidden_act=.exec.: must be one of"),
        ({"use_aux_norm": True}, "use_aux_norm: there is no such key"),
        ({"fc_norm": "true"}, "fc_norm=.true.: must be true or false"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc are both true"),
        ({"attention_bias": True}, "describes a drafter that isn't supported: attention_bias=true: must be False"),
        ({"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window=true: must be False"),
        (
            {"eagle_config": {**OPTIMIZER_NESTED, "parallel_draft_step": 4}},
            "parallel_draft_step=4: must be 1",
        ),
    ],
)
def test_an_unsupported_configuration_is_an_error_before_weights_are_read(change, message, llama, tmp_path, monkeypatch):
    publish(tmp_path / "a", OWN_EAGLE3, **change)
    monkeypatch.setattr("outrider.models.export.folders.Folder.load", lambda self: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=message):
        import_drafter(tmp_path / "a", llama)
