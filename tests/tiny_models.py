"""Tiny random targets that tests save, and the identity of a target without files."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from outrider.data.manifest import TargetIdentity

IDENTITY = TargetIdentity(
    name="t",
    revision=None,
    weights_sha256="1",
    config_sha256="",
    quantization="",
    tokenizer_sha256="2",
    hidden_size=8,
    vocab_size=16,
)


def save_tiny_target(
    directory: Path, model_class: Any, config_class: Any, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> Path:
    """Save a random target of hidden size 32, and a tokenizer.

    `options` change the target's configuration.
    """
    config = config_class(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "dtype": "float32",
            **options,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
