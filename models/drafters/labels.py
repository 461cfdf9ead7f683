"""The labelled draft tokens of a batch: which there are, and where."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped

from ...data.types import UNKNOWN, DrafterBatch, to_device
from .label_weights import missed_share


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLabels:
    """The fields of `Labels` that decide which labels there are, as numpy arrays."""

    of_known: torch.Tensor
    """The `known` of the labels that these arrays belong to."""
    known: Bool[np.ndarray, "position depth"]
    text_index: Int[np.ndarray, "position depth"]
    on_text: Bool[np.ndarray, "position depth"]


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labelled draft tokens of a batch: `tokens[n, d]` at position n and depth d.

    `known` marks those that exist. `previous[n, d]` is the token before it, which the drafter
    reads; at depth 0 the target has already chosen it. `text_index[n, d]` is the index of that
    token in the text, among all batch x seq tokens. `on_text` marks where the continuation has
    followed the text so far; there the target's state in the text is also that of the continuation.
    """

    previous: Int[torch.Tensor, "position depth"]
    tokens: Int[torch.Tensor, "position depth"]
    known: Bool[torch.Tensor, "position depth"]
    text_index: Int[torch.Tensor, "position depth"]
    on_text: Bool[torch.Tensor, "position depth"]
    positions: Int[torch.Tensor, " position"]
    """Index of each position's token among all batch x seq tokens."""
    missed: Float[torch.Tensor, "position depth"] | None = None
    """The `missed_share` of each label; None if the batch has no `num_covered`."""
    host: HostLabels | None = None
    """A copy of what decides which labels there are: see `on_host`."""

    @classmethod
    def of(cls, batch: DrafterBatch) -> "Labels":
        """Read the labels at the batch's positions.

        Raises ValueError if they leave nothing to draft.
        """
        # 1. The continuations at the labelled positions. All of this is computed on the host.
        host = batch.on_host
        row, column = host.positions.nonzero()
        continuations = host.continuations[row, column]  # [position, horizon]
        if continuations.shape[1] < 2:
            raise ValueError(
                f"labels of {continuations.shape[1]} token leave nothing to draft; distil with distill.horizon of at least 2"
            )
        # 2. Where in the texts these tokens are, if the texts contain them.
        seq = host.input_ids.shape[1]
        index = column[:, None] + np.arange(
            1, continuations.shape[1]
        )  # [position, depth]: column of `previous`, if in the text
        text_index = row[:, None] * seq + index.clip(max=seq - 1)
        previous = continuations[:, :-1]
        in_text = host.attention_mask.ravel()[text_index] & (index < seq)
        if host.starts is not None:  # packed rows: the next token may belong to another text
            in_text &= host.starts.ravel()[text_index] == host.starts[row, column][:, None]
        follows_text = (host.input_ids.ravel()[text_index] == previous) & in_text
        # 3. A label is known up to the first unknown token, and on the text up to the first
        # difference.
        known = np.logical_and.accumulate(continuations != UNKNOWN, axis=1)[:, 1:]
        on_text = np.logical_and.accumulate(follows_text, axis=1)
        # 4. The same on the device.
        arrays = {"previous": previous, "tokens": continuations[:, 1:], "known": known, "text_index": text_index}
        arrays |= {"on_text": on_text, "positions": row * seq + column}
        tensors = {name: to_device(np.ascontiguousarray(array), batch.positions.device) for name, array in arrays.items()}
        labels = cls(**tensors, host=HostLabels(of_known=tensors["known"], known=known, text_index=text_index, on_text=on_text))
        if batch.num_covered is None:
            return labels
        return replace(labels, missed=missed_share(labels.at_positions(batch.num_covered), labels.known))

    @property
    def on_host(self) -> HostLabels:
        """What decides which labels there are; a copy, or else read from the device."""
        if self.host is not None and self.host.of_known is self.known:
            return self.host
        arrays = {name: getattr(self, name).cpu().numpy() for name in ("known", "text_index", "on_text")}
        return HostLabels(of_known=self.known, **arrays)

    @cached_property
    def index(self) -> Int[torch.Tensor, " label"]:
        """Index of each known label among all position x depth."""
        return to_device(np.flatnonzero(self.on_host.known), self.known.device)

    def take(self, values: Shaped[torch.Tensor, "position depth *rest"]) -> Shaped[torch.Tensor, "label *rest"]:
        """Return the values of the known labels, by position."""
        return values.flatten(0, 1).index_select(0, self.index)

    def spread(self, values: Shaped[torch.Tensor, " label"], empty: int) -> Shaped[torch.Tensor, "position depth"]:
        """Return values of the known labels by position and depth; `empty` where there is no label."""
        return (
            torch.full_like(self.known, empty, dtype=values.dtype)
            .flatten()
            .index_copy(0, self.index, values)
            .view_as(self.known)
        )

    def at_positions(self, values: Shaped[torch.Tensor, "batch seq *rest"]) -> Shaped[torch.Tensor, "position *rest"]:
        """Return the values of the tokens at the labelled positions."""
        return values.flatten(0, 1).index_select(0, self.positions)

    def first(self, num_depths: int) -> "Labels":
        """Return the labels of the first `num_depths` depths."""
        host, known = self.on_host, self.known[:, :num_depths]
        cut = {name: getattr(host, name)[:, :num_depths] for name in ("known", "text_index", "on_text")}
        return Labels(
            previous=self.previous[:, :num_depths],
            tokens=self.tokens[:, :num_depths],
            known=known,
            text_index=self.text_index[:, :num_depths],
            on_text=self.on_text[:, :num_depths],
            positions=self.positions,
            missed=None if self.missed is None else self.missed[:, :num_depths],
            host=HostLabels(of_known=known, **cut),
        )
