"""The labels of a batch on the host: which there are, and where.

The loss chooses its shapes and indexes from these arrays, so that it never waits for a device. The
tensors that a device needs of them are made here too, in the thread that makes the batch.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Int

from .bundles import Bundle, Move

UNKNOWN = -1
"""Label of an unknown token: beyond the end of the text, after a stop token, or not requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """What decides which labels a batch has, as numpy arrays."""

    of_positions: torch.Tensor
    """The `positions` of the batch that these arrays belong to."""
    input_ids: Int[np.ndarray, "batch seq"]
    attention_mask: Bool[np.ndarray, "batch seq"]
    positions: Bool[np.ndarray, "batch seq"]
    continuations: Int[np.ndarray, "batch seq horizon"]
    starts: Int[np.ndarray, "batch seq"] | None
    has_top: Bool[np.ndarray, "batch seq"] | None
    """Which tokens have top tokens; None if the batch has none."""


@dataclass(frozen=True, kw_only=True)
class HostLabels:
    """The fields of `Labels` that decide which labels there are, and indexes of the known labels."""

    known: Bool[np.ndarray, "position depth"]
    text_index: Int[np.ndarray, "position depth"]
    on_text: Bool[np.ndarray, "position depth"]

    @cached_property
    def index(self) -> Int[np.ndarray, " label"]:
        """Index of each known label among all position x depth."""
        return np.flatnonzero(self.known)

    @cached_property
    def depth(self) -> Int[np.ndarray, " label"]:
        """Depth of each known label."""
        return self.index % max(1, self.known.shape[1])

    @cached_property
    def in_text(self) -> Int[np.ndarray, " label_on_text"]:
        """The known labels on the text, in the order of `text_index`.

        These are indexes of known labels. Labels of one token of the text are next to each other, in
        the order of their positions.
        """
        # Within a depth, `text_index` ascends with the position. So all depths are a few ascending
        # runs, the deepest first, which a stable sort merges.
        chosen = (self.known & self.on_text).T[::-1]
        label = self.known.ravel().cumsum().reshape(self.known.shape) - 1
        return label.T[::-1][chosen][self.text_index.T[::-1][chosen].argsort(kind="stable")]

    def first(self, num_depths: int) -> "HostLabels":
        """Return the labels of the first `num_depths` depths."""
        known, text_index, on_text = (array[:, :num_depths] for array in (self.known, self.text_index, self.on_text))
        return HostLabels(known=known, text_index=text_index, on_text=on_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchIndexes:
    """The labels at a batch's positions, on the host, and a bundle of tensors for the device.

    The bundle has the fields of `Labels` and `Branches` in models/drafters, by their names there.
    """

    of_positions: torch.Tensor
    """The `positions` of the batch that these belong to."""
    labels: HostLabels
    bundle: Bundle

    @classmethod
    def of(cls, host: HostBatch) -> "BatchIndexes":
        """Compute all indexes of a batch."""
        # 1. The continuations at the labelled positions.
        row, column = host.positions.nonzero()
        continuations = host.continuations[row, column]  # [position, horizon]
        previous, tokens = continuations[:, :-1], continuations[:, 1:]
        labels = _host_labels(host, row, column, continuations)
        arrays = {"previous": previous, "tokens": tokens, "known": labels.known, "text_index": labels.text_index}
        arrays |= {"on_text": labels.on_text, "positions": row * host.positions.shape[1] + column}
        # 2. Indexes of the known labels, and of the branches.
        arrays |= {"index": labels.index, "depth": labels.depth} | _branch_arrays(host, row, column)
        labels.in_text  # noqa: B018 -- computed here, in the thread that makes the batch
        return cls(of_positions=host.of_positions, labels=labels, bundle=Bundle.of(arrays))

    def moved(self, move: Move, of_positions: torch.Tensor) -> "BatchIndexes":
        """Return these indexes, copied by `move`, for a batch whose positions are `of_positions`."""
        return replace(self, of_positions=of_positions, bundle=self.bundle.moved(move))


def _host_labels(
    host: HostBatch,
    row: Int[np.ndarray, " position"],
    column: Int[np.ndarray, " position"],
    continuations: Int[np.ndarray, "position horizon"],
) -> HostLabels:
    """Return which labels the positions at these rows and columns have."""
    # 1. Where in the texts these tokens are, if the texts contain them.
    seq, previous = host.input_ids.shape[1], continuations[:, :-1]
    index = column[:, None] + np.arange(1, continuations.shape[1])  # [position, depth]: column of `previous`, if in the text
    text_index = row[:, None] * seq + index.clip(max=seq - 1)
    in_text = host.attention_mask.ravel()[text_index] & (index < seq)
    if host.starts is not None:  # packed rows: the next token may belong to another text
        in_text &= host.starts.ravel()[text_index] == host.starts[row, column][:, None]
    follows_text = (host.input_ids.ravel()[text_index] == previous) & in_text
    # 2. A label is known up to the first unknown token, and on the text up to the first difference.
    known = np.logical_and.accumulate(continuations != UNKNOWN, axis=1)[:, 1:]
    on_text = np.logical_and.accumulate(follows_text, axis=1)
    return HostLabels(known=known, text_index=text_index, on_text=on_text)


def _branch_arrays(
    host: HostBatch, row: Int[np.ndarray, " position"], column: Int[np.ndarray, " position"]
) -> dict[str, np.ndarray]:
    """Return the fields of `Branches`, for a branch at each of these positions."""
    count = host.positions.sum(1)
    real = np.arange(count.max()) < count[:, None]  # [batch, branch]
    columns = np.zeros(real.shape, np.int64)
    columns[real] = column
    arrays = {"columns": columns, "branch_index": np.flatnonzero(real)}
    if host.starts is not None:
        starts = np.zeros(real.shape, np.int64)
        starts[real] = host.starts[row, column]
        arrays["starts"] = starts
    return arrays
