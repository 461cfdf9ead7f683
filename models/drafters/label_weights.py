"""Weights of labels in the loss, for `train.label_weights`."""

import torch
from jaxtyping import Bool, Float, Int

from .losses import DPACE_FLOOR, LEAST_WEIGHT


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
