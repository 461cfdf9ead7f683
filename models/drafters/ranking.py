"""Selection of the few largest of many values."""

import torch
from jaxtyping import Float, Int
from torch.nn.functional import pad

BLOCK_SIZE = 64
"""Number of neighbouring values in a block."""
MIN_VALUES = 2**15
"""Fewest values, of the whole batch, of which blocks are ranked first: of fewer, `topk` alone is
faster on a CPU."""


def largest(
    values: Float[torch.Tensor, "*batch value"], count: int
) -> tuple[Float[torch.Tensor, "*batch count"], Int[torch.Tensor, "*batch count"]]:
    """Return the `count` largest values in descending order, and their indexes, like `topk`.

    On a CPU `topk` takes longer than computing the values. So only the maxima of blocks are ranked
    there, and then the values in the best `count` blocks. No other block can have one of the
    largest values. Equal values may come in another order than from `topk`.
    """
    num_values = values.shape[-1]
    if values.device.type != "cpu" or values.numel() < MIN_VALUES or num_values < BLOCK_SIZE * count:
        return values.topk(count, dim=-1)
    if missing := -num_values % BLOCK_SIZE:
        values = pad(values, (0, missing), value=-torch.inf)
    blocks = values.unflatten(-1, (-1, BLOCK_SIZE))
    best = blocks.amax(-1).topk(count, dim=-1, sorted=False).indices
    candidates = blocks.gather(-2, best[..., None].expand(*best.shape, BLOCK_SIZE)).flatten(-2)
    top, chosen = candidates.topk(count, dim=-1)
    return top, best.gather(-1, chosen // BLOCK_SIZE) * BLOCK_SIZE + chosen % BLOCK_SIZE
