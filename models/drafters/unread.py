"""Tokens of a text that a drafter hasn't read yet, because a step drafted without it."""

import torch
from jaxtyping import Shaped
from torch.nn.functional import pad

from ..decoding.types import Counts

MAX_UNREAD = 64
"""A drafter that is skipped reads its text after so many tokens, so that the next draft
doesn't have to read a long text at once."""


def to_width(values: Shaped[torch.Tensor, "batch width *item"], width: int) -> Shaped[torch.Tensor, "batch wide *item"]:
    """Return so many values of each row: cut, or padded with zeros."""
    missing = width - values.shape[1]
    return pad(values, (0, 0) * (values.ndim - 2) + (0, missing)) if missing > 0 else values[:, :width]


def append(
    values: Shaped[torch.Tensor, "batch width *item"], counts: Counts, new: Shaped[torch.Tensor, "batch added *item"]
) -> Shaped[torch.Tensor, "batch longer *item"]:
    """Write `new` behind the first `counts` values of each row.

    What follows the new values in a row is arbitrary.
        rows  a b c   counts 3, new x y   ->   a b c x y
              d . .          1      z .        d z . . .
    """
    width, added = max(counts.host), new.shape[1]
    if min(counts.host) == width:
        return torch.cat([values[:, :width], new], dim=1)
    longer = torch.cat([values[:, :width], torch.zeros_like(new)], dim=1)
    columns = counts.device[:, None] + torch.arange(added, device=new.device)
    return longer.scatter(1, columns.view(*columns.shape, *[1] * (new.ndim - 2)).expand_as(new), new)
