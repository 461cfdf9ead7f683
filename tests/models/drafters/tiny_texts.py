"""Models with so few tokens that the distribution of all texts can be enumerated."""

import itertools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.decoding import Sampling, warp
from outrider.models.llm.hf_target import HFTarget

VOCAB, TEMPERATURE, PROMPT = 3, 0.7, [0, 1, 2, 1]


def make_tiny(like: HFTarget, seed: int) -> HFTarget:
    """Make a random Llama in float64 with the (unused) tokenizer and identity of `like`."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.6,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).double().eval().requires_grad_(False)
    return HFTarget(model, like.tokenizer, like.identity)


def joint(model, length: int) -> torch.Tensor:
    """Compute the distribution of texts of `length` tokens after PROMPT, by forward passes."""
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)))
    both = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], dim=1)
    with torch.inference_mode():
        probs = warp(model(both).logits[:, len(PROMPT) - 1 : -1], Sampling(temperature=TEMPERATURE))
    return probs.gather(2, texts[..., None])[..., 0].prod(1)


def code(tokens: torch.Tensor) -> torch.Tensor:
    """Return the index of each text in `joint`."""
    return (tokens * VOCAB ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(1)
