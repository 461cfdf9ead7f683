"""Shards of labelled examples: safetensors files, each complete once it has a sidecar.

`shard-00003.safetensors` holds the examples one after another, as flat tensors with offsets.
`shard-00003.json` is its `ShardEntry`, written afterwards. A shard without a sidecar doesn't count.

A shard may also hold `hidden_states` and `layer.2`, `layer.4`, ... (the inputs of these layers);
8-bit states have `.scales`. It may hold top tokens, as `top_tokens` and `top_log_probs` at the
positions where `top_mask` is set.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from .manifest import Manifest, ShardEntry
from .states import StoredStates, joined
from .store import ShardStore
from .types import UNKNOWN, DistilledExample, Example, TargetReads, TopTokens

METADATA_KEY = "outrider"
LAYER, SCALES = "layer.", ".scales"

TOP_BYTES = 4 + 2
"""Bytes of one top token on disk: its id, and its log-probability in float16, with relative error
2^-11."""


def label_store(directory: Path, data_facts: Mapping[str, Any] | None = None) -> ShardStore[ShardEntry, Manifest]:
    """Return the store of the label shards in a folder."""
    return ShardStore(directory, "shard", ".safetensors", ShardEntry, Manifest, data_facts)


def write_shard(directory: Path, index: int, examples: list[DistilledExample]) -> ShardEntry:
    """Write one shard and then its sidecar, each atomically.

    Either all examples have hidden states, a layer's inputs or top tokens, or none has. The same
    examples give the same bytes.
    """
    # 1. Tokens, masks and labels.
    assert examples, "a shard holds at least one example"
    lengths = torch.tensor([0] + [len(example.example.input_ids) for example in examples])
    tensors = {
        "offsets": lengths.cumsum(0),
        "input_ids": torch.cat([example.example.input_ids for example in examples]).to("cpu", torch.int32),
        "loss_mask": torch.cat([example.example.loss_mask for example in examples]).cpu(),
        "continuations": torch.cat([example.continuations for example in examples]).to("cpu", torch.int32),
    }
    # 2. Stored states and top tokens.
    stored = [_states_by_name(example) for example in examples]
    assert all(states.keys() == stored[0].keys() for states in stored), "either all examples have a layer's states or none has"
    for name in stored[0]:
        together = joined([states[name] for states in stored])
        tensors |= {name: together.values} | ({} if together.scales is None else {name + SCALES: together.scales})
    tops = [example.top for example in examples if example.top is not None]
    if tops:
        assert len(tops) == len(examples), "either every example of a shard has top tokens or none has"
        tensors |= _top_tensors(tops)
    # 3. Write. The metadata has one key only: safetensors writes several keys in an order that
    # changes from run to run, which would change the digest.
    ids = [example.example.id for example in examples]
    data = save(tensors, metadata={METADATA_KEY: json.dumps({"ids": ids})})
    return label_store(directory).write(
        index,
        data,
        num_bytes=len(data),
        ids=ids,
        num_tokens=len(tensors["input_ids"]),
        num_labels=int((tensors["continuations"][:, 0] != UNKNOWN).sum()),
    )


def verify_shards(directory: Path, manifest: Manifest, *, rank: int = 0, num_processes: int = 1) -> None:
    """Raise ValueError if the manifest is incomplete, or a shard of this process's share is damaged."""
    if not manifest.complete:
        raise ValueError(f"the distillation in {directory} is not complete; run the stage distill again to resume it")
    for entry in manifest.shards[rank::num_processes]:
        label_store(directory).require_intact(entry)


def read_shard(directory: Path, entry: ShardEntry, reads: TargetReads | None = None) -> list[DistilledExample]:
    """Read the examples of one shard in order, after checking its digest.

    Raises the errors of `ShardStore.require_intact`. `reads` selects the tensors besides the tokens; None
    reads all.
    """
    # 1. Read the tensors.
    label_store(directory).require_intact(entry)
    path = directory / entry.file
    with safe_open(path, framework="pt") as file:
        ids = json.loads(file.metadata()[METADATA_KEY])["ids"]
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names if reads is None or _is_read(name, reads)}
    # 2. Cut them into examples.
    lengths = tensors.pop("offsets").diff().tolist()
    texts = zip(ids, tensors.pop("input_ids").split(lengths), tensors.pop("loss_mask").split(lengths), strict=True)
    examples = [Example(id=id, input_ids=input_ids.long(), loss_mask=loss_mask) for id, input_ids, loss_mask in texts]
    return with_labels(examples, _unpacked(tensors))


def with_labels(examples: Sequence[Example], tensors: Mapping[str, torch.Tensor]) -> list[DistilledExample]:
    """Return examples with their labels and states, which follow each other in tensors with the names of a shard's."""
    lengths = [len(example.input_ids) for example in examples]
    parts = {name: values.split(lengths) for name, values in tensors.items()}
    return [
        _with_labels(example, {name: values[row] for name, values in parts.items()}) for row, example in enumerate(examples)
    ]


def _with_labels(example: Example, tensors: Mapping[str, torch.Tensor]) -> DistilledExample:
    states = {
        name: StoredStates(values=values, scales=tensors.get(name + SCALES))
        for name, values in tensors.items()
        if name == "hidden_states" or (name.startswith(LAYER) and not name.endswith(SCALES))
    }
    return DistilledExample(
        example=example,
        continuations=tensors["continuations"].long(),
        hidden_states=states.pop("hidden_states", None),
        layers={int(name.removeprefix(LAYER)): layer_states for name, layer_states in states.items()},
        top=TopTokens(tokens=tensors["top_tokens"], log_probs=tensors["top_log_probs"]) if "top_tokens" in tensors else None,
    )


def _states_by_name(example: DistilledExample) -> dict[str, StoredStates]:
    named = {} if example.hidden_states is None else {"hidden_states": example.hidden_states}
    return named | {f"{LAYER}{number}": states for number, states in example.layers.items()}


def _top_tensors(tops: Sequence[TopTokens]) -> dict[str, torch.Tensor]:
    """Pack top tokens: keep only positions that have any, which are the assistant's."""
    tokens = torch.cat([top.tokens for top in tops]).cpu()
    mask = tokens[:, 0] != UNKNOWN
    log_probs = torch.cat([top.log_probs for top in tops]).cpu()
    return {
        "top_mask": mask,
        "top_tokens": tokens[mask].to(torch.int32),
        "top_log_probs": log_probs[mask].to(torch.float16),
    }


def _unpacked(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return a shard's tensors with top tokens, if there are any, for all tokens."""
    if "top_mask" not in tensors:
        return tensors
    mask, packed = tensors["top_mask"], tensors["top_tokens"]
    tokens = torch.full((len(mask), packed.shape[1]), UNKNOWN, dtype=torch.int32)
    log_probs = torch.full(tokens.shape, -math.inf, dtype=torch.float16)
    tokens[mask], log_probs[mask] = packed, tensors["top_log_probs"]
    return {**tensors, "top_tokens": tokens, "top_log_probs": log_probs}


def _is_read(name: str, reads: TargetReads) -> bool:
    if name.startswith("top_"):
        return reads.top
    if name.startswith("hidden_states"):
        return reads.hidden_states
    return not name.startswith(LAYER) or int(name.removeprefix(LAYER).removesuffix(SCALES)) in reads.layers
