"""The labelled draft tokens of a batch: which there are, and where."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped

from ...data.bundles import Bundle, move_to
from ...data.label_arrays import HostLabels
from ...data.types import DrafterBatch
from .losses import DPACE_FLOOR, LEAST_WEIGHT


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
    missed: Float[torch.Tensor, "position depth"] | None = None
    """The `missed_share` of each label; None if the batch has no `num_covered`."""
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
        labels = cls(
            **{name: tensors[name] for name in names},
            made=KnownLabels(of_known=tensors["known"], host=indexes.labels, index=tensors["index"], depth=tensors["depth"]),
        )
        if batch.num_covered is None:
            return labels
        return replace(labels, missed=missed_share(labels.at_positions(batch.num_covered), labels.known))

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
            missed=None if self.missed is None else self.missed[:, :num_depths],
            made=KnownLabels.of(known, self.known_labels.host.first(num_depths)),
        )


# --- weights of labels in the loss, for `train.label_weights`


def missed_share(
    num_covered: Int[torch.Tensor, " position"], known: Bool[torch.Tensor, "position depth"]
) -> Float[torch.Tensor, "position depth"]:
    """Return the share that another drafter misses of each label and the labels after it.

    At position n the other drafter proposes the first `num_covered[n]` draft tokens. A label that
    it misses has weight 1, since all labels after it are missed too. A label that it proposes is a
    part of the path to the missed ones. The trained drafter needs the whole path, because a
    proposal starts at the last committed token. Such a label counts as much as the path helps:

        labels  a b c d, the other drafter proposes a b:   weights  2/4  2/3  1  1
        labels  a b c d, the other drafter proposes all:   weights  LEAST_WEIGHT, four times

    This is the collective boost-tuning of SpecInfer (arXiv 2305.09781, section 3), which drops
    whole texts. Here the unit is a label, and none is dropped.
    """
    depth = torch.arange(known.shape[1], device=known.device)
    num_known = known.sum(1, keepdim=True)
    share = (num_known - num_covered[:, None]) / (num_known - depth).clamp(min=1)
    return share.clamp(min=LEAST_WEIGHT, max=1)


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
