"""What a folder of shards holds and which target made it: `manifest.json`, written last."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch

from .choices import FEATURES, STATE_DTYPES
from .differences import differences
from .fields import one_of
from .types import Example, TargetReads

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetIdentity:
    """Which target: two targets are the same when their weights, configurations and tokenizers are, whatever they are called.

    `name` and `revision` are for people (a path may change), the digests decide. `config_sha256` is of what changes answers:
    not of names, versions or the type that weights are stored in. `quantization` are the options that the weights are quantised
    by when they are loaded, in one line; empty where they are used as they are stored.
    """

    name: str
    revision: str | None
    weights_sha256: str
    config_sha256: str
    quantization: str
    tokenizer_sha256: str
    """Empty where the target was loaded without a tokenizer."""
    hidden_size: int
    vocab_size: int

    def facts(self) -> dict[str, Any]:
        """Return what decides whether another target is the same."""
        return {name: value for name, value in asdict(self).items() if name not in ("name", "revision")}

    def differences(self, other: "TargetIdentity") -> list[str]:
        """Return texts about the fields that make `other` a different target."""
        return list(differences(self.facts(), other.facts()).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseEntry:
    """One complete shard: its file, and that file's digest."""

    index: int
    file: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseManifest:
    """All shards of one run of a stage.

    `target_dtype` is the type that the target computed in. `data_sha256` is a digest of the data, in
    order; `plan_sha256` is a digest of which of them go into which shard; `complete` is False until
    every shard is there. No field has a default: reading a file that lacks one raises ValueError.
    """

    format_version: int
    target: TargetIdentity
    target_dtype: str
    data_sha256: str
    plan_sha256: str
    shards: Sequence[BaseEntry]
    complete: bool

    def facts(self) -> dict[str, Any]:
        """Return what decides the content of the shards."""
        facts = {name: value for name, value in asdict(self).items() if name not in ("shards", "complete")}
        return facts | {"target": self.target.facts()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry(BaseEntry):
    """One complete shard of labels, its size, and the examples in it.

    `num_tokens` counts the tokens of all its texts, `num_labels` the positions that have a continuation.
    """

    num_bytes: int
    ids: list[str]
    num_tokens: int
    num_labels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(BaseManifest):
    """All shards of one distillation.

    `horizon` is the number of tokens labelled after a position; `features` says which hidden states lie beside the tokens
    (`none` or `last_hidden`), `feature_layers` the inputs of which layers, `features_dtype` in which of STATE_DTYPES all of
    them are, and `top_logprobs` how many of the target's likeliest next tokens there are. `data_sha256` is `examples_sha256`.
    """

    horizon: int
    features: Annotated[str, one_of(*FEATURES)]
    max_length: int
    shards: list[ShardEntry]
    feature_layers: list[int]
    features_dtype: Annotated[str, one_of(*STATE_DTYPES)]
    top_logprobs: int | None

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"manifest of format version {self.format_version}; this outrider reads version {FORMAT_VERSION}. Distil again"
            )
        ids = [id for shard in self.shards for id in shard.ids]
        if len(set(ids)) != len(ids):
            raise ValueError(
                "a manifest names an example twice: its shards come from different runs. Distil into an empty folder"
            )

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_labels(self) -> int:
        return sum(shard.num_labels for shard in self.shards)

    def stored(self, reads: TargetReads) -> TargetReads:
        """The part of `reads` that the shards hold. Of layers all or none: a pass of the target gives all at once."""
        return TargetReads(
            hidden_states=reads.hidden_states and self.features == "last_hidden",
            layers=reads.layers if set(reads.layers) <= set(self.feature_layers) else (),
            top=reads.top and self.top_logprobs is not None,
        )

    def require_top(self, reads: TargetReads) -> None:
        """Raise ValueError where likeliest tokens are read, and the shards hold none."""
        if reads.top and self.top_logprobs is None:
            raise ValueError(
                "train.teacher is top_k, and the shards hold none of the target's likeliest tokens: distil with "
                "distill.top_logprobs into another output directory, or set train.teacher=full"
            )

    def require_target(self, identity: TargetIdentity) -> None:
        """Raise ValueError, naming the fields, where these shards were not made by the target `identity`."""
        if changes := self.target.differences(identity):
            raise ValueError(
                f"the shards were distilled with the target {self.target.name!r} (revision {self.target.revision}), but the "
                f"run's target is {identity.name!r} (revision {identity.revision}); they differ in {'; '.join(changes)}. "
                "A drafter learns one target's own words: set target.name_or_path to the target of the shards, or distil again "
                "into another output directory"
            )


def examples_sha256(examples: Iterable[Example]) -> str:
    """A digest of the examples' ids, tokens and masks, in order: equal digests mean equal work."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(f"{example.id}\0{len(example.input_ids)}\0".encode())
        digest.update(example.input_ids.to(torch.int32).numpy().tobytes())
        digest.update(example.loss_mask.numpy().tobytes())
    return digest.hexdigest()
