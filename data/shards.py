"""Shards of distilled examples: safetensors files, each with a sidecar that says it is complete.

`shard-00003.safetensors` holds the examples end to end as flat tensors with offsets; `shard-00003.json` is its `ShardEntry`,
written after it. A shard without a sidecar doesn't count.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from .files import atomic_write_bytes, parse_dataclass, read_json, sha256_file, write_json
from .manifest import Manifest, ShardEntry
from .types import UNKNOWN, DistilledExample, Example

METADATA_KEY = "outrider"


def write_shard(directory: Path, index: int, examples: list[DistilledExample]) -> ShardEntry:
    """Write one shard and then its sidecar, each whole or not at all.

    Hidden states keep their dtype; either all examples have them or none. The same examples give the same bytes.
    """
    assert examples, "a shard holds at least one example"
    lengths = torch.tensor([0] + [len(example.example.input_ids) for example in examples])
    tensors = {
        "offsets": lengths.cumsum(0),
        "input_ids": torch.cat([example.example.input_ids for example in examples]).to("cpu", torch.int32),
        "loss_mask": torch.cat([example.example.loss_mask for example in examples]).cpu(),
        "continuations": torch.cat([example.continuations for example in examples]).to("cpu", torch.int32),
    }
    hidden_states = [example.hidden_states for example in examples if example.hidden_states is not None]
    if hidden_states:
        assert len(hidden_states) == len(examples), "either every example of a shard has hidden states or none has"
        tensors["hidden_states"] = torch.cat(hidden_states).cpu()
    ids = [example.example.id for example in examples]
    # One key only: safetensors writes several in an order that changes from run to run, and with it the digest.
    path = directory / f"{_stem(index)}.safetensors"
    data = save(tensors, metadata={METADATA_KEY: json.dumps({"ids": ids})})
    atomic_write_bytes(path, data)
    entry = ShardEntry(
        index=index,
        file=path.name,
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        ids=ids,
        num_tokens=len(tensors["input_ids"]),
        num_labels=int((tensors["continuations"][:, 0] != UNKNOWN).sum()),
    )
    write_json(sidecar_path(directory, index), asdict(entry))
    return entry


def read_entry(directory: Path, index: int) -> ShardEntry | None:
    """The sidecar of shard `index`, or None where there is none yet. A malformed sidecar is a ValueError."""
    path = sidecar_path(directory, index)
    if not path.exists():
        return None
    try:
        return parse_dataclass(ShardEntry, read_json(path), path)
    except ValueError as error:
        raise ValueError(f"{error}. Delete {path}, then run the stage distill again: it makes just this shard anew") from error


def is_written(directory: Path, index: int) -> bool:
    """Whether shard `index` was finished: its sidecar, which is written last, is there."""
    return sidecar_path(directory, index).exists()


def forget(directory: Path, index: int) -> None:
    """Let shard `index` count as not written."""
    sidecar_path(directory, index).unlink()


def verify_shard(directory: Path, entry: ShardEntry) -> None:
    """Raise ValueError, with what is wrong and the remedy, where the shard's file is missing, cut or altered."""
    path = directory / entry.file
    if not path.exists():
        problem = "is missing"
    elif (num_bytes := path.stat().st_size) < entry.num_bytes:
        problem = f"is truncated: {num_bytes} of {entry.num_bytes} bytes"
    elif sha256_file(path) != entry.sha256:
        problem = "was altered: its SHA-256 digest is not the recorded one"
    else:
        return
    raise ValueError(
        f"the shard {path} {problem}. Delete it and {sidecar_path(directory, entry.index).name}, then run the stage distill "
        "again: it makes just this shard anew"
    )


def verify_shards(directory: Path, manifest: Manifest) -> None:
    """Raise ValueError where the manifest isn't complete or one of its shards is missing, cut or altered."""
    if not manifest.complete:
        raise ValueError(
            f"the distillation in {directory} is not complete; run the stage distill again, which goes on from there"
        )
    for entry in manifest.shards:
        verify_shard(directory, entry)


def read_shard(directory: Path, entry: ShardEntry) -> list[DistilledExample]:
    """The examples of one shard, in their order, after checking its digest (errors as in `verify_shard`)."""
    verify_shard(directory, entry)
    path = directory / entry.file
    with safe_open(path, framework="pt") as file:
        ids = json.loads(file.metadata()[METADATA_KEY])["ids"]
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
    if ids != entry.ids:
        raise ValueError(f"the shard {path} holds other examples than its entry says; distil again into an empty folder")
    hidden_states = tensors.get("hidden_states")
    examples = []
    offsets = tensors["offsets"].tolist()
    for id, start, end in zip(ids, offsets[:-1], offsets[1:], strict=True):
        example = Example(id=id, input_ids=tensors["input_ids"][start:end].long(), loss_mask=tensors["loss_mask"][start:end])
        examples.append(
            DistilledExample(
                example=example,
                continuations=tensors["continuations"][start:end].long(),
                hidden_states=None if hidden_states is None else hidden_states[start:end],
            )
        )
    return examples


def _stem(index: int) -> str:
    return f"shard-{index:05d}"


def sidecar_path(directory: Path, index: int) -> Path:
    """The file that says that shard `index` is complete."""
    return directory / f"{_stem(index)}.json"
