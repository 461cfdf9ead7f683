"""The manifest of a folder of shards, `manifest.json`, which is written last; and the statistics beside it."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from pydantic import Field

from .config import FEATURES, STATE_DTYPES, TEACHER_TEMPERATURE
from .fields import RecordedCount, differences, one_of
from .types import Example, TargetReads

FORMAT_VERSION = 3
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetIdentity:
    """Identity of a target: equal weights, configurations and tokenizers mean the same target.

    `name` and `revision` are for readers, since a path may change; the digests decide.
    `config_sha256` covers the keys that change answers, not names, versions or the stored type of
    the weights. `quantization` are the options for quantising the weights while loading, as one
    line; empty if the weights are used as stored.
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
        """Return the fields that decide whether two targets are the same."""
        return {name: value for name, value in asdict(self).items() if name not in ("name", "revision")}

    def differences(self, other: "TargetIdentity") -> list[str]:
        """Describe the fields that make `other` a different target."""
        return list(differences(self.facts(), other.facts()).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseEntry:
    """One complete shard: its file and the file's digest."""

    index: int
    file: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseManifest:
    """All shards of one run of a stage.

    `target_dtype` is the target's compute type. `data_sha256` is a digest of the data in order.
    `plan_sha256` is a digest of the assignment of data to shards. `complete` is False until every
    shard exists. Reading a file that lacks a field without a default raises ValueError.
    """

    format_version: int
    target: TargetIdentity
    target_dtype: str
    data_sha256: str
    plan_sha256: str
    shards: Sequence[BaseEntry]
    complete: bool

    def facts(self) -> dict[str, Any]:
        """Return the fields that decide the content of the shards."""
        facts = {name: value for name, value in asdict(self).items() if name not in ("shards", "complete")}
        return facts | {"target": self.target.facts()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry(BaseEntry):
    """One complete shard of labels, its size, and its examples.

    `num_tokens` counts the tokens of all texts, `num_labels` the positions with a continuation.
    """

    num_bytes: int
    ids: list[str]
    num_tokens: int
    num_labels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSampling:
    """How labels were sampled from the target: `distill.label_temperature` and `distill.seed`."""

    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(BaseManifest):
    """All shards of one distillation.

    `horizon` is the number of labelled tokens after a position. `features` is the kind of stored
    hidden states (`none` or `last_hidden`), `feature_layers` the layers whose inputs are stored,
    and `features_dtype` the type of all of them, one of STATE_DTYPES. `top_logprobs` is the number
    of stored top tokens per position. `sampling` is None for greedy labels. Without `branches` labels
    end where the target disagrees with the text. `data_sha256` is `examples_sha256`.
    """

    horizon: int
    features: Annotated[str, one_of(*FEATURES)]
    max_length: int
    shards: list[ShardEntry]
    feature_layers: list[int]
    features_dtype: Annotated[str, one_of(*STATE_DTYPES)]
    top_logprobs: int | None
    sampling: LabelSampling | None
    branches: bool = True
    """Manifests of earlier versions lack it, and their labels have branches."""

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"manifest of format version {self.format_version}; this outrider reads version {FORMAT_VERSION}. Distil again"
            )

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_labels(self) -> int:
        return sum(shard.num_labels for shard in self.shards)

    def stored(self, reads: TargetReads) -> TargetReads:
        """Return the part of `reads` that the shards hold.

        Layers count only if all are there, since one pass of the target computes all of them.
        """
        return TargetReads(
            hidden_states=reads.hidden_states and self.features == "last_hidden",
            layers=reads.layers if set(reads.layers) <= set(self.feature_layers) else (),
            top=reads.top and self.top_logprobs is not None,
        )

    def require_top(self, reads: TargetReads) -> None:
        """Raise ValueError if top tokens are read and the shards hold none."""
        if reads.top and self.top_logprobs is None:
            raise ValueError(
                "train.teacher is top_k, and the shards hold no top tokens of the target: distil with "
                "distill.top_logprobs into another output directory, or set train.teacher=full"
            )

    def require_teacher_temperature(self) -> None:
        """Raise ValueError if the teacher's distribution has another temperature than the labels.

        A loss with a teacher learns from the target's distribution at temperature 1 where a label
        follows the text, and from the label elsewhere.
        """
        if self.sampling is not None and self.sampling.temperature != 1:
            raise ValueError(TEACHER_TEMPERATURE.format(self.sampling.temperature))

    def require_target(self, identity: TargetIdentity) -> None:
        """Raise ValueError, with the differing fields, if another target made these shards."""
        if changes := self.target.differences(identity):
            raise ValueError(
                f"the shards were distilled with the target {self.target.name!r} (revision {self.target.revision}), but the "
                f"run's target is {identity.name!r} (revision {identity.revision}); they differ in {'; '.join(changes)}. "
                "A drafter learns from one target: set target.name_or_path to the target of the shards, or distil again "
                "into another output directory"
            )


def examples_sha256(examples: Iterable[Example]) -> str:
    """Return a digest of the examples in order; equal digests mean equal work.

    It covers ids, tokens and masks.
    """
    digest = hashlib.sha256()
    for example in examples:
        digest.update(f"{example.id}\0{len(example.input_ids)}\0".encode())
        digest.update(example.input_ids.to(torch.int32).numpy().tobytes())
        digest.update(example.loss_mask.numpy().tobytes())
    return digest.hexdigest()


STATS_FILE = "stats.json"
Measured = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTotals:
    """Content of `distill/stats.json`. `process_seconds` are summed over the processes."""

    num_examples: RecordedCount
    num_text_tokens: RecordedCount
    num_positions: RecordedCount
    agreement: Measured
    """Share of the texts' tokens that are the target's greedy ones."""
    num_branch_tokens: RecordedCount
    process_seconds: Measured
    positions_per_process_second: Measured
    peak_memory_bytes: RecordedCount | None
    dropped: dict[str, RecordedCount]
    """Number of records that couldn't be used, by reason."""
