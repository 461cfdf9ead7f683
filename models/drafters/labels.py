"""The labels of a batch: the tokens that a drafter learns to draft."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped

from ...data.types import UNKNOWN, DrafterBatch
from .losses import DPACE_FLOOR


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels of a batch: `tokens[n, d]` at position n and depth d, where `known[n, d]`.

    `previous[n, d]` is the token before it, which the drafter reads; at depth 0 the target has
    already chosen it. Unknown entries of both are UNKNOWN. `on_text[n, d]` marks where the continuation
    up to and including `previous[n, d]` equals the text; there the target's state in the text is also
    that of the continuation. `text_index[n, d]` is the index of `previous[n, d]` in the text, among all
    batch x seq tokens. It is clamped to the row, and means nothing where `on_text` is False.
    """

    previous: Int[torch.Tensor, "position depth"]
    tokens: Int[torch.Tensor, "position depth"]
    known: Bool[torch.Tensor, "position depth"]
    text_index: Int[torch.Tensor, "position depth"]
    on_text: Bool[torch.Tensor, "position depth"]
    positions: Int[torch.Tensor, " position"]
    """Index of each position's token among all batch x seq tokens."""

    @classmethod
    def of(cls, batch: DrafterBatch) -> "Labels":
        """Return the labels at the batch's positions. The host waits for their number.

        Raises ValueError if they leave nothing to draft.
        """
        # 1. The continuations at the labelled positions.
        seq, horizon = batch.input_ids.shape[1], batch.continuations.shape[2]
        if horizon < 2:
            raise ValueError(f"labels of {horizon} token leave nothing to draft; distil with distill.horizon of at least 2")
        positions = batch.positions.flatten().nonzero().squeeze(1)
        continuations = batch.continuations.flatten(0, 1)[positions]
        previous = continuations[:, :-1]
        # 2. Where in the texts the tokens `previous` are, if the texts contain them.
        own_column = positions % seq
        column = own_column[:, None] + torch.arange(1, horizon, device=positions.device)
        text_index = (positions - own_column)[:, None] + column.clamp(max=seq - 1)
        in_text = batch.attention_mask.flatten()[text_index] & (column < seq)
        if batch.starts is not None:  # packed rows: the next token may belong to another text
            starts = batch.starts.flatten()
            in_text &= starts[text_index] == starts[positions][:, None]
        follows_text = in_text & (batch.input_ids.flatten()[text_index] == previous)
        # 3. A continuation is on the text up to the first difference.
        return cls(
            previous=previous,
            tokens=continuations[:, 1:],
            known=known_labels(continuations),
            text_index=text_index,
            on_text=follows_text.cumprod(1).bool(),
            positions=positions,
        )

    @property
    def inputs(self) -> Int[torch.Tensor, "position depth"]:
        """The tokens `previous` as a drafter embeds them.

        UNKNOWN is no row of an embedding. Token 0 stands for it, which changes no loss: labels after
        an unknown token aren't known either.
        """
        return self.previous.clamp(min=0)

    def at_positions(self, values: Shaped[torch.Tensor, "batch seq *rest"]) -> Shaped[torch.Tensor, "position *rest"]:
        """Return the values of the tokens at the labelled positions."""
        return values.flatten(0, 1).index_select(0, self.positions)

    def first(self, num_depths: int) -> "Labels":
        """Return the labels of the first `num_depths` depths."""
        names = ("previous", "tokens", "known", "text_index", "on_text")
        return replace(self, **{name: getattr(self, name)[:, :num_depths] for name in names})

    def every(self, step: int) -> "Labels":
        """Return the labels at one in `step` positions, from the first one on."""
        return Labels(**{name: values[::step] for name, values in vars(self).items()})


def known_labels(continuations: Int[torch.Tensor, "position horizon"]) -> Bool[torch.Tensor, "position depth"]:
    """Mark the labels that exist, which are the tokens after the first one and before an unknown one.

    The target has already chosen the first token of a continuation; the draft begins after it.
    """
    return (continuations != UNKNOWN).cumprod(1).bool()[:, 1:]


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
