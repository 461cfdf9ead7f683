"""Shared code of the benchmarks: random targets of real sizes, and limits of the device.

The module is in this folder because the scripts that import it are not installed.
"""

import time
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.manifest import TargetIdentity
from outrider.eval.measure.roofline import MAX_ACCELERATOR_BYTES, measure_bandwidth
from outrider.models.machine import turn_off_cudnn_attention
from outrider.models.target.hf_target import HFTarget

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
"""Sizes of matrices, on CUDA (True) and on other devices."""


def open_device(name: str | None, *, cudnn_attention: bool = False) -> torch.device:
    """Return the device of the benchmark, by default the first accelerator.

    As in `load_target`, cuDNN's attention is off unless it is measured.
    """
    device = torch.device(name or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if not cudnn_attention:
        turn_off_cudnn_attention(device)
    return device


def random_llama(shape: dict[str, int], dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """Make a Llama of this shape, with weights sampled on the device."""
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.02)
    # Rotary embeddings have no parameters, and to_empty left their buffers unset.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def target_of(model: LlamaForCausalLM, **form: Any) -> HFTarget:
    """Make a target around a model, with options of `HFTarget` such as cuda_graphs."""
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
    # the benchmarks have no texts
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    return HFTarget(model, empty, identity, **form)


def weight_bytes(model: LlamaForCausalLM) -> int:
    """Count the bytes of weights that a pass reads, without the embeddings."""
    embeddings = model.get_input_embeddings().weight
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters() if parameter is not embeddings)


def memory_bandwidth(device: torch.device) -> float:
    """Measure bytes per second when reading a large buffer, as the evaluation's roofline does."""
    return 1e9 * measure_bandwidth(MAX_ACCELERATOR_BYTES if device.type != "cpu" else 2**26, device)


def matrix_rate(device: torch.device, dtype: torch.dtype, rounds: int = 10) -> float:
    """Measure operations per second of matrix products, for square matrices of the best size.

    A multiplication and an addition count as two operations.
    """
    best = 0.0
    for size in MATRIX_SIZES[device.type == "cuda"]:
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        product = left @ right  # chooses its kernel
        start = clock(device)
        for _ in range(rounds):
            torch.mm(left, right, out=product)
        best = max(best, rounds * 2 * size**3 / (clock(device) - start))
    return best


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
