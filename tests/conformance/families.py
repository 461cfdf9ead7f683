"""Tiny random models of the families of transformers: their configurations, and what each is known for.

Kept apart from the tests of classic architectures (`test_architectures`), which read the same prompts.
"""

from contextlib import suppress
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel

from outrider.models.decoding import GreedyAcceptance, RowSeeds, generate
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.pretrained import auto_class

from ..decoded import texts_of

VOCAB = 100
PROMPTS = [list(range(3, 12)), [50, 51, 52, 53, 54, 55, 56], [97, 3, 14, 15, 92, 65, 35, 89, 79, 32, 38]]
NUMBERS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
SIZES = {**NUMBERS, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "shared_expert_intermediate_size": 24,
}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
# With few heads, many keys of the index have the score 0, and which of them are read is arbitrary.
INDEX = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 64,
}
CONV = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
CONV_AND_WINDOW = {
    "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    "conv_L_cache": 3,
    "sliding_window": 6,
}
VISION = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}

BRANCHES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("smollm3", "apertus", "seed_oss", "hunyuan_v1_dense", "ernie4_5", "bitnet", "nanochat", "ministral3"), SIZES
    ),
    **dict.fromkeys(("dots1", "glm4_moe", "minimax_m2", "hy_v3"), EXPERTS),
    "internlm3": SIZES,
    "minimax_m3_vl_text": EXPERTS,
    "gemma4_unified_text": WINDOW,
    "kimi_k25": {"text_config": {**SIZES, **EXPERTS, **LATENT, "model_type": "deepseek_v3"}, "vision_config": VISION},
    "step3p7": {"text_config": {**NUMBERS, **EXPERTS, **WINDOW}, "vision_config": VISION},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    "gemma4_text": {**WINDOW, **PER_LAYER, "global_head_dim": 16, "num_kv_shared_layers": 2},
    **dict.fromkeys(("exaone4", "olmo3", "granite_swa"), WINDOW),
    **dict.fromkeys(("laguna", "afmoe", "gpt_oss"), EXPERTS | WINDOW),
    "mimo_v2_flash": {
        **(EXPERTS | WINDOW),
        "v_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "minicpm3": LATENT,
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), EXPERTS | LATENT),
    "mistral4": EXPERTS | LATENT | {"head_dim": 16},
    "longcat_flash": {
        **LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "moe_topk": 2,
    },
    "exaone4_5": {
        "text_config": {**SIZES, **WINDOW, "model_type": "exaone4"},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": 32,
            "num_key_value_heads": 2,
        },
    },
}
"""Families whose positions are all labelled with branches."""
ALONG_THE_TEXT: dict[str, dict[str, Any]] = {
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "hy_v4"), EXPERTS | LATENT | INDEX),
    **dict.fromkeys(("qwen3_5_text", "olmo_hybrid"), LINEAR),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), EXPERTS | LINEAR),
    "kimi_linear": EXPERTS | LATENT | LINEAR | {"linear_head_dim": 8, "linear_num_heads": 4},
    "zaya": {"num_experts": 4, "moe_intermediate_size": 24},
    "bailing_hybrid": EXPERTS | LATENT | LINEAR,
    "nemotron_h": {
        **EXPERTS,
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "conv_kernel": 3,
        "chunk_size": 8,
    },
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 24}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "falcon_h1": MAMBA,
    "mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 1, "conv_kernel": 3, "chunk_size": 8},
    "lfm2": CONV,
    "lfm3": CONV_AND_WINDOW,
    "lfm2_moe": CONV | EXPERTS,
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_conv": 3,
        "chunk_size": 8,
        "num_mem_blocks": 1,
    },
}
"""Families that decode draft trees, and are labelled along the text."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "jamba": (
        {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 4,
        },
        "reads a draft tree differently",
    ),
    "recurrent_gemma": (
        {"lru_width": 32, "attention_window_size": 6, "block_types": ["recurrent", "attention"]},
        "reads a draft tree differently",
    ),
    "rwkv": ({"attention_hidden_size": 32}, "reads a draft tree differently"),
    "minimax": (
        {"layer_types": LINEAR["layer_types"], "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4},
        "reads no cache but its own kind",
    ),
    "qwen4_exp_text": (
        {
            **(EXPERTS | LINEAR),
            "shared_expert_intermediate_size": 24,
            "hc_count": 2,
            "hc_lowrank": 8,
            "ple_embed_dim": 32,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 64,
            "make_ngram_vocab_size_divisible_by": 4,
            "split_ngram_parts": 2,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
        "own code in transformers failed",
    ),
    **dict.fromkeys(("mamba", "falcon_mamba", "xlstm"), ({}, "own code in transformers failed")),
    "glm5_next": (
        {
            "text_config": {
                **NUMBERS,
                **EXPERTS,
                **LATENT,
                **LINEAR,
                **INDEX,
                "qk_rope_head_dim": 0,
                "index_topk": 16,
            },
            "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32},
        },
        "own code in transformers failed",
    ),
    **dict.fromkeys(("inkling_text", "inkling2_text"), (EXPERTS, "layers of type hybrid_sliding")),
    "deepseek_v4": (EXPERTS | LATENT | INDEX, "layers of type compressed_sparse_attention"),
}
"""Families that don't decode, and a part of the error."""


def make_family(name: str) -> PreTrainedModel:
    """Build a model of a family with random weights so large that every parameter counts, in float64."""
    options = BRANCHES.get(name) or ALONG_THE_TEXT.get(name) or REFUSED.get(name, ({},))[0]
    config = AutoConfig.for_model(name, **(options if "text_config" in options else SIZES | options))
    for part in (config, config.get_text_config()):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            with suppress(StrictDataclassError):  # some families must have one
                setattr(part, key, None)
    torch.manual_seed(0)
    build = auto_class(config)
    supports_sdpa = build._model_mapping[type(config)]._supports_sdpa
    model: PreTrainedModel = build.from_config(config, attn_implementation="sdpa" if supports_sdpa else "eager").double().eval()
    for parameter_name, parameter in model.named_parameters():
        is_norm = "norm" in parameter_name and "weight" in parameter_name
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.3)
    if "xperts" in repr(model):
        with suppress(ValueError, AttributeError):
            model.set_experts_implementation("eager")  # the others can't compute in float64
    return model.requires_grad_(False)


def decode(
    target: HFTarget, drafter: Any, prompts: list[list[int]], num_new: int, rule: Any = None, seeds: Any = None
) -> tuple[list[list[int]], int]:
    """Return the answers, and the number of accepted draft tokens."""
    inputs, generator = [torch.tensor(prompt) for prompt in prompts], None if seeds is None else RowSeeds(seeds)
    steps = list(generate(target, drafter, rule or GreedyAcceptance(), inputs, max_new_tokens=num_new, generator=generator))
    return texts_of(steps, len(prompts)), sum(sum(step.num_accepted) for step in steps)
