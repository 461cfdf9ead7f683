"""EAGLE-1 and EAGLE-3 formats, against tables of engines and published drafters."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from outrider.models.drafters import build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.export import eagle1, eagle3, speculators
from outrider.models.export.formats import read_folder, write_folder
from outrider.models.export.registry import format_of, import_drafter

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
# 0.5.23). In both, d2t plus the index of an output is the target's token.
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


@pytest.mark.parametrize("draft_vocab_size", [DRAFT, None])
def test_tensorrt_llm_recognises_an_eagle3_export_and_finds_all_of_its_tensors(
    draft_vocab_size, make_target, make_drafter, tmp_path
):
    """The rules are those of its modeling_auto.py (01bffee) and modeling_speculative.py (b35ac1b)."""
    target = make_target("llama")
    write_folder(eagle3.FORMAT, make_drafter("eagle3", target, draft_vocab_size=draft_vocab_size), tmp_path / "a", target)
    config, tensors = written(tmp_path / "a")
    # A configuration with draft_vocab_size is of EAGLE-3; one class is registered.
    assert "draft_vocab_size" in config
    assert "EAGLE3" + config["architectures"][0].replace("Eagle3", "") == "EAGLE3LlamaForCausalLM"
    # Its model's parameters: those of the engines, without t2d. d2t belongs to a reduced vocabulary.
    missing = {"t2d"} if draft_vocab_size else {"t2d", "d2t"}
    expected = {name: shape for name, shape in EAGLE3.items() if name not in missing}
    expected["lm_head.weight"] = (draft_vocab_size or V, H)
    assert {name: tuple(tensors[name].shape) for name in expected} == expected
    assert tensors.keys() - expected.keys() <= {"t2d"}


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
        ("qwen3", eagle1.SGLANG, {}, r"its layer is qwen3's.*train with 'drafter.layer={model_type: llama}'"),
        ("qwen3", eagle3.FORMAT, {}, r"its layer is qwen3's.*train with 'drafter.layer={model_type: llama}'"),
        ("qwen2", speculators.FORMAT, {}, r"its layer is qwen2's"),
        (
            "llama",
            eagle3.FORMAT,
            {"feature_layers": [1, 2, 3]},
            r"layers \[1, 2, 3\], but vLLM and SGLang agree on",
        ),
        (
            "llama",
            speculators.FORMAT,
            {"feature_layers": [1, 2]},
            "it reads 2 of the target's layers, but vLLM always provides 3",
        ),
        (
            "llama",
            speculators.FORMAT,
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


# --- drafters that others have published


def release(path: Path, table: dict[str, tuple[int, ...]], *, seed: int = 0, **config: Any) -> dict[str, torch.Tensor]:
    """Write a folder as the release of github.com/SafeAILab/EAGLE does; return its tensors.

    The tensors are pickled, and the configuration is that of its models.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: 0.3 * torch.randn(shape, generator=generator).half() for name, shape in table.items()}
    if "d2t" in table:
        tokens = torch.randperm(V, generator=generator)[: table["d2t"][0]].sort().values
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, tokens, True)
    path.mkdir()
    torch.save(tensors, path / "pytorch_model.bin")
    stored_config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": H,
        "initializer_range": 0.02,
        "intermediate_size": MLP,
        "max_position_embeddings": 64,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": V,
    }
    stored_config = {key: value for key, value in {**stored_config, **config}.items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(stored_config))
    return tensors


# Our name for each tensor of the release. Without the names, a swap of two vectors of one shape
# would go unnoticed.
OURS_EAGLE1 = {
    "fc.weight": "fc.weight",
    "layers.0.self_attn.q_proj.weight": "layer.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight": "layer.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight": "layer.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight": "layer.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight": "layer.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight": "layer.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight": "layer.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight": "layer.post_attention_layernorm.weight",
}
OURS_EAGLE3 = {name.replace("layers.0", "midlayer"): ours for name, ours in OURS_EAGLE1.items()} | {
    "midlayer.hidden_norm.weight": "hidden_norm.weight",
    "midlayer.input_layernorm.weight": "layer.input_layernorm.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}


def resave(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, path / "pytorch_model.bin")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parts", [(), ("embed_tokens",), ("embed_tokens", "lm_head", "inv_freq")])
def test_eagle1_of_the_release_is_imported(bias, parts, llama, tmp_path):
    tensors = release(tmp_path / "a", SGLANG_EAGLE1 if bias else VLLM_EAGLE1, bias=bias)
    extras = {
        "embed_tokens": {"embed_tokens.weight": llama.embed_tokens.weight.half()},
        "lm_head": {"lm_head.weight": llama.head.weight.bfloat16()},
        "inv_freq": {"layers.0.self_attn.rotary_emb.inv_freq": 1 / 50000 ** (torch.arange(0, 8, 2) / 8)},
    }
    resave(tmp_path / "a", tensors | {name: tensor for part in parts for name, tensor in extras[part].items()})
    assert format_of(tmp_path / "a").kind == "eagle"
    drafter = import_drafter(tmp_path / "a", llama, options={"tree": "static"})
    assert (drafter.config.bias, drafter.config.layer, drafter.config.tree) == (bias, None, "static")
    assert drafter.fc.weight.dtype == torch.float16
    save_drafter(drafter, tmp_path / "ours", llama.identity)
    ours = load_drafter(tmp_path / "ours", llama).state_dict()
    expected = {ours_name: tensors[name].float() for name, ours_name in OURS_EAGLE1.items()}
    if bias:
        expected["fc.bias"] = tensors["fc.bias"].float()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


def test_eagle3_of_the_release_keeps_its_own_rotary_base_and_tokens(llama, tmp_path):
    """Without rope_theta in the configuration, the rotary base is transformers' default."""
    tensors = release(tmp_path / "a", EAGLE3, draft_vocab_size=DRAFT, rope_theta="absent")
    assert format_of(tmp_path / "a").name == "eagle3"
    drafter = import_drafter(tmp_path / "a", llama, options={"depth": 3})
    assert drafter.config.layer["rope_parameters"]["rope_theta"] == 10000.0
    assert torch.allclose(drafter.own_rotary.inv_freq, 1 / 10000 ** (torch.arange(0, 8, 2) / 8))
    assert drafter.feature_layers == (2, 3, 4)
    assert drafter.draft_tokens.tolist() == (torch.arange(DRAFT) + tensors["d2t"]).tolist()
    loaded = drafter.state_dict()
    assert loaded.keys() == {*OURS_EAGLE3.values(), "draft_tokens"}
    assert all(torch.equal(loaded[ours], tensors[name]) for name, ours in OURS_EAGLE3.items())
    save_drafter(drafter, tmp_path / "ours", llama.identity)
    write_folder(eagle3.FORMAT, load_drafter(tmp_path / "ours", llama), tmp_path / "again", llama)
    config, again = written(tmp_path / "again")
    assert (config["rope_theta"], config["draft_vocab_size"]) == (10000.0, DRAFT)
    assert all(torch.equal(tensor, again[name].to(tensor.dtype)) for name, tensor in tensors.items())


def test_a_llama_layer_for_a_qwen3_target_stays_a_llama_layer(make_target, tmp_path):
    """Nearly all published drafters for Qwen3 have a Llama layer."""
    target = make_target("qwen3")
    release(tmp_path / "a", EAGLE3, draft_vocab_size=DRAFT)
    drafter = import_drafter(tmp_path / "a", target)
    assert drafter.config.layer["model_type"] == "llama"
    assert not hasattr(drafter.layer.self_attn, "q_norm")


def test_outputs_in_another_order_than_the_targets_tokens_are_sorted(llama, tmp_path):
    tensors = release(tmp_path / "a", EAGLE3, draft_vocab_size=DRAFT)
    tokens = (torch.arange(DRAFT) + tensors["d2t"]).flip(0)
    resave(tmp_path / "a", {**tensors, "d2t": tokens - torch.arange(DRAFT)})
    drafter = import_drafter(tmp_path / "a", llama)
    assert drafter.draft_tokens.tolist() == tokens.flip(0).tolist()
    assert torch.equal(drafter.lm_head.weight, tensors["lm_head.weight"].flip(0))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, the target's 32"),
        ({"vocab_size": 301}, "vocab_size is 301, the target's 300"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"norm_before_residual": True}, "norm_before_residual True"),
        ({"fc_norm": True}, "missing fc_norm.0.weight; missing fc_norm.1.weight; missing fc_norm.2.weight"),
        ({"norm_before_fc": True}, "missing input_norm.weight"),
        ({"norm_output": 1}, "has norm_output 1; it must be true or false"),
        ({"draft_vocab_size": 301}, "draft_vocab_size 301; it must be from 1 to the target's 300"),
        ({"draft_vocab_size": "40"}, "draft_vocab_size '40'"),
        ({"draft_vocab_size": 39}, r"d2t is \(40,\), not \(39,\); lm_head.weight is \(40, 32\)"),
        (
            {"intermediate_size": 10**12},
            "it has intermediate_size 1000000000000",
        ),
        ({"num_attention_heads": "4"}, "it has num_attention_heads '4'"),
        ({"rope_scaling": {"rope_type": "nonsense"}}, "rope_scaling of the type 'nonsense' \\(known: default, linear"),
        ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, "rope_scaling of two types"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling of the type None"),
        ({"rope_scaling": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope_scaling of the type None"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "foo": 1}}, "an unknown key rope_scaling.foo"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "rope_scaling.factor '8'"),
        ({"rope_theta": 10**30}, "rope_theta 1000"),
        ({"rope_theta": 10.0, "rope_parameters": {"rope_theta": 20.0}}, "several rope_theta: 20.0 in rope_parameters, 10.0 in"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 4}},
            "different rope_parameters and rope_scaling",
        ),
        ({"num_attention_heads": None}, "no num_attention_heads"),
        ({"hidden_act": ["silu"]}, r"hidden_act \['silu'\]"),
        ({"sliding_window": 16}, "sliding_window 16"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, "option feature_layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "last hidden state only"),
        ({"eagle_config": ["x"]}, "has eagle_config"),
        ({"eagle_config": {"stray": 1}}, "has eagle_config"),
        ({"rope_theta": 0}, "it has rope_theta 0"),
        ({"rms_norm_eps": float("nan")}, "it has rms_norm_eps nan"),
        ({"hidden_act": "exec"}, "it has hidden_act .exec."),
    ],
)
def test_an_unsupported_configuration_is_an_error_before_weights_are_read(config, message, llama, tmp_path, monkeypatch):
    release(tmp_path / "a", EAGLE3, **{"draft_vocab_size": DRAFT, **config})
    monkeypatch.setattr("outrider.models.export.folders.Folder.load", lambda self: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=message):
        import_drafter(tmp_path / "a", llama)


@pytest.mark.parametrize("layers", [[2, 3, 4], [1, 2, 3]])
def test_feature_layers_follow_both_engines_numbering_or_the_option(layers, llama, tmp_path):
    release(tmp_path / "a", EAGLE3, draft_vocab_size=DRAFT, eagle_aux_hidden_state_layer_ids=layers)
    assert import_drafter(tmp_path / "a", llama).feature_layers == (2, 3, 4)
    release(tmp_path / "b", EAGLE3, draft_vocab_size=DRAFT)
    assert import_drafter(tmp_path / "b", llama, options={"feature_layers": [0, 1, 5]}).feature_layers == (0, 1, 5)


def test_tensors_that_contradict_the_target_or_each_other_are_an_error(llama, tmp_path):
    tensors = release(tmp_path / "a", EAGLE3, draft_vocab_size=DRAFT)
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
    tensors = release(tmp_path / "b", VLLM_EAGLE1)
    resave(tmp_path / "b", {**tensors, "layers.0.self_attn.rotary_emb.inv_freq": 1 / 10000 ** (torch.arange(0, 8, 2) / 8)})
    with pytest.raises(ValueError, match="contradicts the base in its config.json"):
        import_drafter(tmp_path / "b", llama)
    release(tmp_path / "c", VLLM_EAGLE1, bias=True)
    with pytest.raises(ValueError, match="has bias True in config.json, but fc.bias is missing"):
        import_drafter(tmp_path / "c", llama)
