"""The labelled draft tokens of a batch: which there are, and where."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped

from ...data.bundles import Bundle, move_to
from ...data.label_arrays import HostLabels
from ...data.types import DrafterBatch
from .losses import DPACE_FLOOR


@dataclass(frozen=True, kw_only=True)
class KnownLabels:
    """Which labels are known, on the host and on the device.

    The fields of a `Labels` may be replaced. So this has the `known` that it belongs to.
    """

    of_known: Bool[torch.Tensor, "position depth"]
    host: HostLabels
    index: Int[torch.Tensor, " label"]
    """Index of each known label among all position x depth."""
    depth: Int[torch.Tensor, " label"]
    """Depth of each known label."""

    @classmethod
    def of(cls, known: Bool[torch.Tensor, "position depth"], host: HostLabels) -> "KnownLabels":
        """Copy the host's indexes to the device of `known`."""
        bundle = Bundle.of({"index": host.index, "depth": host.depth})
        return cls(of_known=known, host=host, **bundle.moved(move_to(known.device)).tensors())


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
    made: KnownLabels | None = None
    """The known labels, if they were made with the batch: see `known_labels`."""

    @classmethod
    def of(cls, batch: DrafterBatch) -> "Labels":
        """Return the labels at the batch's positions, from its index tensors.

        Raises ValueError if they leave nothing to draft.
        """
        if batch.continuations.shape[2] < 2:
            raise ValueError(
                f"labels of {batch.continuations.shape[2]} token leave nothing to draft; distil with distill.horizon of at "
                "least 2"
            )
        indexes = batch.label_indexes
        tensors = indexes.bundle.tensors()
        names = ("previous", "tokens", "known", "text_index", "on_text", "positions")
        return cls(
            **{name: tensors[name] for name in names},
            made=KnownLabels(of_known=tensors["known"], host=indexes.labels, index=tensors["index"], depth=tensors["depth"]),
        )

    @cached_property
    def known_labels(self) -> KnownLabels:
        """The known labels: made with the batch, or else read from the device."""
        if self.made is not None and self.made.of_known is self.known:
            return self.made
        arrays = {name: getattr(self, name).cpu().numpy() for name in ("known", "text_index", "on_text")}
        return KnownLabels.of(self.known, HostLabels(**arrays))

    def take(self, values: Shaped[torch.Tensor, "position depth *rest"]) -> Shaped[torch.Tensor, "label *rest"]:
        """Return the values of the known labels, by position."""
        return values.flatten(0, 1).index_select(0, self.known_labels.index)

    def spread(self, values: Shaped[torch.Tensor, " label"], empty: int) -> Shaped[torch.Tensor, "position depth"]:
        """Return values of the known labels by position and depth; `empty` where there is no label."""
        return (
            torch.full_like(self.known, empty, dtype=values.dtype)
            .flatten()
            .index_copy(0, self.known_labels.index, values)
            .view_as(self.known)
        )

    def at_positions(self, values: Shaped[torch.Tensor, "batch seq *rest"]) -> Shaped[torch.Tensor, "position *rest"]:
        """Return the values of the tokens at the labelled positions."""
        return values.flatten(0, 1).index_select(0, self.positions)

    def first(self, num_depths: int) -> "Labels":
        """Return the labels of the first `num_depths` depths."""
        if num_depths >= self.known.shape[1]:
            return self
        known = self.known[:, :num_depths]
        return Labels(
            previous=self.previous[:, :num_depths],
            tokens=self.tokens[:, :num_depths],
            known=known,
            text_index=self.text_index[:, :num_depths],
            on_text=self.on_text[:, :num_depths],
            positions=self.positions,
            made=KnownLabels.of(known, self.known_labels.host.first(num_depths)),
        )


def dpace_weights(
    log_probs: Float[torch.Tensor, "position depth"], known: Bool[torch.Tensor, "position depth"]
) -> Float[torch.Tensor, "position depth"]:
    """Return D-PACE's weights (arXiv 2605.18810, equations 7 and 8), of `log_probs` of the labels.

        c_i = (1 - a) q(label_i) + a,   weight_j = sum over m >= j of c_0 ... c_m,   a = DPACE_FLOOR

    This is what the labels from depth j on add to the expected accepted length. A label counts
    little if the drafter misses those before it, and much if many labels depend on it.
    """
    confidence = ((1 - DPACE_FLOOR) * log_probs.exp() + DPACE_FLOOR) * known
    return confidence.cumprod(1).flip(1).cumsum(1).flip(1)
