"""Tensors of the target stored besides the tokens: checks, computation and size in bytes."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int

from ...data.shards import TOP_BYTES
from ...data.states import encode_states, state_bytes
from ...data.types import DistilledExample, Example, TopTokens
from ...models.target.hf_target import HFTarget
from ...models.target.hidden_states import decoder_layers
from ..config import DistillConfig

TOKEN_BYTES = 4
"""Bytes of a token's id, and of each token of its label."""
MASK_BYTES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFeatures:
    """Tensors that the target computed for right-padded texts; meaningless on padding.

    `hidden_states` are those of the last layer, after the final norm. `layers` maps a layer's
    number to its input. `top_tokens` and `top_log_probs` are None if they weren't requested.
    """

    hidden_states: Float[torch.Tensor, "batch seq hidden"]
    layers: dict[int, Float[torch.Tensor, "batch seq hidden"]]
    top_tokens: Int[torch.Tensor, "batch seq top"] | None
    top_log_probs: Float[torch.Tensor, "batch seq top"] | None


def bytes_per_token(config: DistillConfig, hidden_size: int, *, labelled: float = 1.0) -> float:
    """Return the bytes on disk per token of text: id, mask, label, and stored states.

    `labelled` is the share of tokens with top tokens, if these are stored: about the assistant's
    share.
    """
    num_states = config.last_hidden + len(config.feature_layers)
    states = num_states * state_bytes(hidden_size, config.features_dtype)
    top = 0.0 if config.top_logprobs is None else MASK_BYTES + labelled * config.top_logprobs * TOP_BYTES
    return TOKEN_BYTES * (1 + config.horizon) + MASK_BYTES + states + top


def num_bytes(config: DistillConfig, target: HFTarget, examples: Sequence[Example]) -> int:
    """Estimate the bytes of these examples' shards, from below.

    Top tokens are stored at a few more positions than counted here.
    """
    num_tokens = sum(len(example.input_ids) for example in examples)
    num_labelled = sum(int(example.wanted.sum()) for example in examples)
    return int(num_tokens * bytes_per_token(config, target.hidden_size, labelled=num_labelled / max(1, num_tokens)))


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the disk of a directory, which need not exist."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def require_features(config: DistillConfig, target: HFTarget) -> None:
    """Raise ValueError if the target can't provide the tensors to be stored."""
    num_layers = len(decoder_layers(target.model))
    if beyond := [layer for layer in config.feature_layers if layer >= num_layers]:
        raise ValueError(
            f"distill.feature_layers has {', '.join(map(str, beyond))}, and the target {target.identity.name} has the layers 0 "
            f"to {num_layers - 1}; choose some of those"
        )
    if config.top_logprobs is None:
        return
    if config.top_logprobs > target.vocab_size:
        raise ValueError(
            f"distill.top_logprobs is {config.top_logprobs}, and the target {target.identity.name} has {target.vocab_size} "
            "tokens; lower it"
        )
    target.require_plain_head("leave distill.top_logprobs out")


def require_space(config: DistillConfig, target: HFTarget, examples: Sequence[Example], output_dir: Path) -> None:
    """Raise ValueError if the shards of these examples don't fit on the disk."""
    num_tokens = sum(len(example.input_ids) for example in examples)
    needed, free = num_bytes(config, target, examples), free_bytes(output_dir)
    if needed > free:
        raise ValueError(
            f"the shards take about {needed / 1e6:,.1f} MB ({num_tokens} tokens of {needed / num_tokens:.0f} bytes), and the "
            f"disk of {output_dir} has {free / 1e6:,.1f} MB left; store less (distill.features, feature_layers, top_logprobs), "
            "in fewer bits (distill.features_dtype), or of fewer texts, or choose another output directory"
        )


def stored_example(
    config: DistillConfig,
    example: Example,
    continuations: Int[torch.Tensor, "seq horizon"],
    features: TextFeatures,
    row: int,
) -> DistilledExample:
    """Return the example with its labels and the configured tensors, on the CPU.

    The tensors come from row `row` of the features. Raises ValueError with the example's id if the
    target's states aren't finite.
    """
    num_tokens = len(example.input_ids)
    try:
        layers = {
            layer: encode_states(features.layers[layer][row, :num_tokens], config.features_dtype)
            for layer in config.feature_layers
        }
        last = encode_states(features.hidden_states[row, :num_tokens], config.features_dtype) if config.last_hidden else None
    except ValueError as error:
        raise ValueError(f"example {example.id!r}: {error}") from error
    top = None
    if features.top_tokens is not None and features.top_log_probs is not None:
        top = TopTokens(
            tokens=features.top_tokens[row, :num_tokens].cpu(), log_probs=features.top_log_probs[row, :num_tokens].cpu()
        )
    return DistilledExample(
        example=example, continuations=continuations[:num_tokens], hidden_states=last, layers=layers, top=top
    )
