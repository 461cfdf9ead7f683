"""Random models of real sizes, the rate of a device, and the report of the benchmarks in this folder."""

import dataclasses
import gc
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.files import write_json
from outrider.data.manifest import TargetIdentity
from outrider.eval.measure.environment import describe_environment
from outrider.models.llm.hf_target import HFTarget
from outrider.models.machine import synchronize, turn_off_cudnn_attention

SHAPES = {
    "llama8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
}
MATRIX_SIZES = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the matrices whose product is timed, by type of device."""
FAILURES = (RuntimeError, ValueError)
"""Errors of a case, such as too little memory. The other cases are still measured."""


def open_device(name: str | None) -> torch.device:
    """Return the named device, else the first accelerator, else the CPU, set up as `load_target` does."""
    device = torch.device(name or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    turn_off_cudnn_attention(device)
    return device


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the type of the models: bfloat16, and float32 on a CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def random_llama(shape: str, device: torch.device) -> LlamaForCausalLM:
    """Build a Llama of a shape, with weights sampled on the device."""
    config = LlamaConfig(**SHAPES[shape], bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype_on(device))
    model = model.to_empty(device=device).eval().requires_grad_(False)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.02)
    # The rotary embeddings have buffers only, which to_empty leaves uninitialised.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def target_of(model: LlamaForCausalLM, **form: Any) -> HFTarget:
    """Build a target of a random model; its tokenizer has no vocabulary."""
    digests = dict.fromkeys(("weights_sha256", "config_sha256", "quantization", "tokenizer_sha256"), "")
    sizes = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    identity = TargetIdentity(name="random", revision=None, **digests, **sizes)
    return HFTarget(model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE())), identity, **form)


def matrix_rate(device: torch.device, rounds: int = 10) -> float:
    """Return the operations per second of a large matrix product: two for each multiplication and addition."""
    size = MATRIX_SIZES[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype_on(device)) for _ in range(2))
    product = left @ right  # lets the library choose its kernel
    start = clock(device)
    for _ in range(rounds):
        torch.mm(left, right, out=product)
    return rounds * 2 * size**3 / (clock(device) - start)


def clock(device: torch.device) -> float:
    """Return the time after all work of the device."""
    synchronize(device)
    return time.perf_counter()


def free_memory(device: torch.device) -> None:
    """Free the memory of models that aren't used any more."""
    torch._dynamo.reset()
    gc.collect()  # a target and its recorded functions refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Report:
    """The rows and failures of a benchmark, written after each case, so that results are kept."""

    def __init__(self, output: Path, device: torch.device, **facts: Any) -> None:
        self.output, self.rows, self.failed = output, list[dict[str, Any]](), list[dict[str, Any]]()
        self.facts = {
            "command": shlex.join(["python", *sys.argv]),
            **facts,
            "environment": dataclasses.asdict(describe_environment(device)),
        }

    def add(self, case: dict[str, Any], values: dict[str, Any] | Exception) -> None:
        """Add a case's values, or the error that ended it."""
        if isinstance(values, Exception):
            self.failed.append({**case, "error": f"{type(values).__name__}: {values}"[:500]})
        else:
            self.rows.append({**case, **values})
        self.write()

    def write(self) -> None:
        """Write the file."""
        write_json(self.output, {**self.facts, "rows": self.rows, "failed": self.failed})

    def print(self) -> None:
        """Write the file once more; print rows and failures, and where they were written."""
        self.write()
        print(pd.DataFrame(self.rows).to_string(index=False, na_rep="-", float_format="{:,.3g}".format))
        for case in self.failed:
            print(f"failed: {case}")
        print(f"Written to {self.output}")
