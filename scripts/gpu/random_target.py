"""Common parts of the benchmarks: random targets of real sizes, and peak rates of a device.

This module is next to the scripts that import it, since they are run from here and not installed.
"""

import time
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.data.manifest import TargetIdentity
from outrider.eval.measure.roofline import MAX_ACCELERATOR_BYTES, measure_bandwidth
from outrider.models.llm.hf_target import HFTarget
from outrider.models.machine import turn_off_cudnn_attention

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
LLAMA_1B = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
MATRIX_SIZES = {True: (4096, 8192, 16384), False: (256, 512)}
"""Sizes on CUDA, and on other devices."""


def open_device(name: str | None, *, cudnn_attention: bool = False) -> torch.device:
    """Return the device to measure on: the named one, else the first accelerator, else the CPU.

    cuDNN's attention is turned off, as in `load_target`, unless it is to be measured.
    """
    device = torch.device(name or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if not cudnn_attention:
        turn_off_cudnn_attention(device)
    return device


def random_llama(shape: dict[str, int], dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """Build a Llama of this shape, with weights sampled on the device."""
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.02)
    # The rotary embeddings have buffers only, which to_empty leaves uninitialised.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def target_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **form: Any) -> HFTarget:
    """Build a target of a model, with the options of `HFTarget`.

    Most benchmarks need no text, so the default is a tokenizer without a vocabulary.
    """
    identity = TargetIdentity(
        name="random",
        revision=None,
        weights_sha256="",
        config_sha256="",
        quantization="",
        tokenizer_sha256="",
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
    )
    return HFTarget(model, tokenizer or PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE())), identity, **form)


def weight_bytes(model: LlamaForCausalLM) -> int:
    """Return the bytes of weights that a pass reads: all except most embeddings."""
    embeddings = model.get_input_embeddings().weight
    return sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight is not embeddings)


def memory_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of reading a buffer larger than any cache.

    Evaluation's roofline measures it in the same way.
    """
    return 1e9 * measure_bandwidth(MAX_ACCELERATOR_BYTES if device.type != "cpu" else 2**26, device)


def matrix_rate(device: torch.device, dtype: torch.dtype, rounds: int = 10) -> float:
    """Return the operations per second of large matrix products, at the best of several sizes.

    A multiplication and an addition are two operations.
    """
    best = 0.0
    for size in MATRIX_SIZES[device.type == "cuda"]:
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        product = left @ right  # lets the library choose its kernel
        start = clock(device)
        for _ in range(rounds):
            torch.mm(left, right, out=product)
        best = max(best, rounds * 2 * size**3 / (clock(device) - start))
    return best


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
