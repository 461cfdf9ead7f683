"""Attacks by architectures: random models that read trees in batches must answer as one text alone.

Float64 must give the tokens of full forwards without cache, mask or any code of outrider, for batches
of 1 to 5 prompts of odd lengths. In bf16, whose near ties depend on the shape of a product, a token
must be plain decoding's, or its logit must lie within the noise of the arithmetic.
"""

from functools import partial
from pathlib import Path
from typing import Any

from .cases import RIGHT, WRONG, Case, Finding
from .lab import TARGET

KIND = "architectures"
VOCAB, NUM_NEW = 100, 10
PROMPTS = [list(range(3, 12)), [50, 51, 52, 53, 54, 55, 56], [97], [7] * 23, [5, 9, 2, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69]]
RIGHT_DEPTHS = [3, 2, 0, 1, 3]
"""How far the draft of each row is right."""
NOISE_SHARE = 0.05
"""Most noise of bf16, as a share of the logits' standard deviation."""
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GQA = {**SMALL, "num_key_value_heads": 2}
HEADS = {**GQA, "head_dim": 8}
WINDOW = {**GQA, "sliding_window": 6}
MIXED = {**HEADS, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 3,
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GQA),
    "llama, tied": ("Llama", {**SMALL, "tie_word_embeddings": True}),
    "llama, one head": ("Llama", {**GQA, "num_key_value_heads": 1}),
    "llama, biases": ("Llama", {**GQA, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {**GQA, "sliding_window": None}),
    "mistral, window": ("Mistral", WINDOW),
    "ministral": ("Ministral", {**MIXED}),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", GQA),
    "qwen2, windows": ("Qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen2 moe": ("Qwen2Moe", {**GQA, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "qwen3": ("Qwen3", HEADS),
    "qwen3 moe": ("Qwen3Moe", {**HEADS, **MOE, "num_experts": 4}),
    "gemma": ("Gemma", HEADS),
    "gemma2": ("Gemma2", {**MIXED, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", MIXED),
    "phi": ("Phi", GQA),
    "phi3": ("Phi3", {**GQA, "sliding_window": None}),
    "phi3, window": ("Phi3", WINDOW),
    "phimoe": ("Phimoe", {**GQA, "num_local_experts": 4}),
    "olmo": ("Olmo", GQA),
    "olmo2": ("Olmo2", GQA),
    "olmo3": ("Olmo3", MIXED),
    "olmoe": ("Olmoe", {**GQA, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt neox": ("GPTNeoX", SMALL),
    "gpt2": ("GPT2", GPT2),
    "gpt bigcode": ("GPTBigCode", GPT2),
    "gptj": ("GPTJ", {**GPT2, "rotary_dim": 8}),
    "codegen": ("CodeGen", {**GPT2, "rotary_dim": 8}),
    "opt": ("OPT", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "biogpt": ("BioGpt", SMALL),
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("Falcon", {**SMALL, "new_decoder_architecture": False, "alibi": False}),
    "mpt": ("Mpt", {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
    "stablelm": ("StableLm", GQA),
    "starcoder2": ("Starcoder2", {**GQA, "sliding_window": None}),
    "starcoder2, window": ("Starcoder2", WINDOW),
    "persimmon": ("Persimmon", SMALL),
    "nemotron": ("Nemotron", GQA),
    "cohere": ("Cohere", {**GQA, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**GQA, "sliding_window": 6}),
    "granite": ("Granite", {**GQA, "logits_scaling": 2.0}),
    "granite moe": ("GraniteMoe", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm": ("Glm", HEADS),
    "glm4": ("Glm4", HEADS),
    "helium": ("Helium", HEADS),
    "smollm3": ("SmolLM3", GQA),
    "exaone4": ("Exaone4", MIXED),
    "seed-oss": ("SeedOss", HEADS),
    "arcee": ("Arcee", GQA),
    "deepseek v2": ("DeepseekV2", {**SMALL, **LATENT}),
    "deepseek v3": ("DeepseekV3", {**SMALL, **LATENT}),
    "mamba": ("Mamba", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}),
    "qwen3 next": ("Qwen3Next", {**HEADS, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 24}),
}  # fmt: skip
"""Architectures of transformers, and small configurations of them."""


def make_cases(folder: Path, lab: Path) -> list[Case]:
    """Return a case for each architecture and number type."""
    return [
        Case(kind=KIND, name=f"{name}: {dtype}", attack=partial(compare, architecture, options, dtype))
        for name, (architecture, options) in ARCHITECTURES.items()
        for dtype in ("float64", "bfloat16")
    ]


def compare(architecture: str, options: dict[str, Any], dtype: str, place: Path) -> Finding:
    """Decode batches of 1 to 5 prompts with drafts, and compare every row with its prompt alone."""
    import torch

    model = make_model(architecture, options, getattr(torch, dtype))
    expected = [full_forwards(model, prompt) for prompt in PROMPTS]
    num_ties = 0
    for size in range(1, len(PROMPTS) + 1):
        for row, actual in enumerate(decode(model, PROMPTS[:size], expected)):
            if actual == (wanted := expected[row]):
                continue
            if dtype == "float64" or not is_tie(model, PROMPTS[row], actual):
                return Finding(WRONG, f"batch of {size}, row {row}: {actual} instead of {wanted}")
            num_ties += 1
    return Finding(RIGHT, f"{num_ties} answers differ from plain decoding's within the noise" if num_ties else "")


def make_model(architecture: str, options: dict[str, Any], dtype: Any) -> Any:
    """Return a model with random weights so large that every parameter changes its output."""
    import torch
    import transformers

    suffix = "TextConfig" if architecture == "Gemma3" else "Config"
    config = getattr(transformers, architecture + suffix)(**options)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    suffix = "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, architecture + suffix)(config).double().eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.3)
    if architecture == "Gemma2":
        model.set_attn_implementation("eager")  # its soft cap needs it
    if "Experts" in repr(model):
        model.set_experts_implementation("eager")  # the others can't compute in float64
    return model.to(dtype)


def full_forwards(model: Any, prompt: list[int]) -> list[int]:
    """Decode greedily without cache, mask, or any code of outrider."""
    import torch

    text = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(NUM_NEW):
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return text[0, len(prompt) :].tolist()


def decode(model: Any, prompts: list[list[int]], expected: list[list[int]]) -> list[list[int]]:
    """Decode a batch with trees that hold the right tokens and wrong ones."""
    import torch
    from transformers import AutoTokenizer

    from outrider.data.manifest import TargetIdentity
    from outrider.models.decoding import GreedyAcceptance, generate
    from outrider.models.drafters.oracle import OracleDrafter
    from outrider.models.llm.hf_target import HFTarget

    identity = TargetIdentity(
        name="tiny", revision=None, weights_sha256="0", config_sha256="", quantization="", tokenizer_sha256="0",
        hidden_size=32, vocab_size=VOCAB,
    )  # fmt: skip
    target = HFTarget(model, AutoTokenizer.from_pretrained(TARGET), identity)
    drafter = OracleDrafter(expected[: len(prompts)], RIGHT_DEPTHS[: len(prompts)], VOCAB)
    rows: list[list[int]] = [[] for _ in prompts]
    texts = [torch.tensor(prompt) for prompt in prompts]
    for step in generate(target, drafter, GreedyAcceptance(), texts, max_new_tokens=NUM_NEW):
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            rows[row] += tokens
    return rows


def is_tie(model: Any, prompt: list[int], tokens: list[int]) -> bool:
    """Whether each token's logit lies within the noise of the largest, in one forward of the whole text."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((logits.max(-1).values - chosen <= NOISE_SHARE * logits.std()).all())
