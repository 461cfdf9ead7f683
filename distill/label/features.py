"""Tensors of the target stored besides the tokens: checks, computation and size in bytes."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int

from ...data.collate import padded
from ...data.device import to_device
from ...data.shards import LAYER, SCALES, TOP_BYTES, with_labels
from ...data.states import are_finite, encode_states, state_bytes
from ...data.types import DistilledExample, Example
from ...models.llm.hf_target import HFTarget
from ...models.llm.hidden_states import decoder_layers
from ...models.machine import available_memory
from ..config import DistillConfig
from ..plan import plan_shards

TOKEN_BYTES = 4
"""Bytes of a token's id, and of each token of its label."""
MASK_BYTES = 1
NOT_FINITE = (
    "the target's hidden states are not all numbers: its weights are damaged, or overflow their type; load it with "
    "target.dtype=bfloat16 or float32, or leave the text out"
)


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
    num_states = (config.features == "last_hidden") + len(config.feature_layers)
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
    """Raise ValueError if the target can't provide the tensors to be stored, or the probabilities of sampled labels."""
    if config.label_temperature:
        target.require_plain_head("leave distill.label_temperature out")
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
    """Raise ValueError if the shards of these examples don't fit on the disk, or two of them in memory."""
    num_tokens = sum(len(example.input_ids) for example in examples)
    needed, free = num_bytes(config, target, examples), free_bytes(output_dir)
    if needed > free:
        raise ValueError(
            f"the shards take about {needed / 1e6:,.1f} MB ({num_tokens} tokens of {needed / num_tokens:.0f} bytes), and the "
            f"disk of {output_dir} has {free / 1e6:,.1f} MB left; store less (distill.features, feature_layers, top_logprobs), "
            "in fewer bits (distill.features_dtype), or of fewer texts, or choose another output directory"
        )
    shards = plan_shards(examples, config.shard_examples)
    needed, memory = 2 * max((num_bytes(config, target, shard) for shard in shards), default=0), available_memory()
    if memory is not None and needed > memory:
        raise ValueError(
            f"two shards are in memory at a time, about {needed / 1e6:,.1f} MB, and {memory / 1e6:,.1f} MB are free; store "
            f"less (distill.features, feature_layers, top_logprobs), or lower distill.shard_examples={config.shard_examples}"
        )


def start_storing(
    config: DistillConfig,
    examples: Sequence[Example],
    continuations: Int[torch.Tensor, "batch seq horizon"],
    features: TextFeatures,
) -> Callable[[], list[DistilledExample]]:
    """Encode what is stored of a batch on the device, and start to copy it to the host.

    Row n of the tensors belongs to example n. Padding is neither encoded nor copied. The returned
    function waits for the copies once, and returns the examples with their labels and the
    configured tensors, on the CPU. It may run in another thread. It raises ValueError with an
    example's id if the target's states of this example aren't finite.
    """
    # 1. The tokens of all texts, one text after another.
    lengths = [len(example.input_ids) for example in examples]
    index = to_device(padded(lengths).index(), continuations.device)
    # 2. Encode the states, and start all copies. The names are those of a shard.
    read = {"continuations": continuations, "top_tokens": features.top_tokens, "top_log_probs": features.top_log_probs}
    tensors = {name: values.flatten(0, 1)[index] for name, values in read.items() if values is not None}
    states = {f"{LAYER}{layer}": features.layers[layer] for layer in config.feature_layers}
    states |= {"hidden_states": features.hidden_states} if config.features == "last_hidden" else {}
    tensors["finite"] = torch.ones_like(index, dtype=torch.bool)
    for name, values in states.items():
        of_tokens = values.flatten(0, 1)[index]
        tensors["finite"] &= are_finite(of_tokens)
        encoded = encode_states(of_tokens, config.features_dtype)
        tensors |= {name: encoded.values} | ({} if encoded.scales is None else {name + SCALES: encoded.scales})
    wait = start_host_copies(tensors)

    # 3. Divide them among the examples, once they are there.
    def finish() -> list[DistilledExample]:
        copied = wait()
        for example, finite in zip(examples, copied.pop("finite").split(lengths), strict=True):
            if not finite.all():
                raise ValueError(f"example {example.id!r}: {NOT_FINITE}")
        return with_labels(examples, copied)

    return finish


def start_host_copies(tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
    """Start to copy the tensors of one device to the host; return a function that waits for the copies.

    From a GPU the copies go to pinned memory, so the host continues, and one wait is enough for all
    of them. The function may run in another thread. It returns tensors in pageable memory, because
    pinned memory is scarce: PyTorch uses it again for the next copies. On other devices the tensors
    are ready at once.
    """
    host = {name: tensor.to("cpu", non_blocking=tensor.is_cuda) for name, tensor in tensors.items()}
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return lambda: host
    copied = torch.cuda.current_stream(next(iter(tensors.values())).device).record_event()

    def wait() -> dict[str, torch.Tensor]:
        copied.synchronize()
        return {name: tensor.clone() for name, tensor in host.items()}

    return wait
