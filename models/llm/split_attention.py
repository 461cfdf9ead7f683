"""Attention with a mask over many keys, in parts that a GPU computes at the same time.

CUDA's kernel for masks gives a group of processors all keys of one key head. With one text and
eight key heads it leaves most of a large GPU idle. So the keys are split into parts, which the
kernel takes as further rows of a batch:

    keys of one text    [kv_head, key, width]
    as a batch          [part, kv_head, chunk, width]     the same memory

Each part has a softmax of its own. The kernel also returns each softmax's log-sum-exp; the parts'
outputs are summed with the weights that follow from these (flash-decoding does the same).

The result equals that of one softmax up to rounding. Which number of parts is fastest, and whether
any is, depends on the GPU and the shape: see `attention_speeds`.
"""

import torch
from jaxtyping import Float

from .attention_kernels import MASK_ALIGNMENT, attention, fold

Query = Float[torch.Tensor, "batch head query head_dim"]
Keys = Float[torch.Tensor, "batch kv_head key head_dim"]
Values = Float[torch.Tensor, "batch kv_head key value_dim"]
SplitMask = Float[torch.Tensor, "batch part query chunk"]
Output = Float[torch.Tensor, "batch query head value_dim"]

PARTS = (1, 4, 8, 16, 32)
"""Numbers of parts to choose from. An extent on an accelerator can be split into each of them."""


def can_split(num_keys: int, num_parts: int) -> bool:
    """Return whether parts are equally long, and their masks begin where the kernel can read."""
    return num_keys % (num_parts * MASK_ALIGNMENT) == 0


def split_mask(mask: Float[torch.Tensor, "batch 1 query key"], num_parts: int) -> SplitMask:
    """Return a copy of a mask, for `attend_split`: the number of parts is in its shape.

    So compiled code serves all numbers of parts: it is made for any shape.
    """
    return mask.squeeze(1).unflatten(2, (num_parts, -1)).transpose(1, 2).contiguous()


def attend_split(query: Query, key: Keys, value: Values, mask: SplitMask, scale: float | None) -> Output:
    """Compute `attend_folded` with the keys in as many parts as the mask has.

    A part may be hidden from a query, for example by a sliding window. Its log-sum-exp is then so
    small that its weight is zero, because hidden scores are finite (see `hidden_score`).
    """
    _, _, num_queries, head_dim = query.shape
    num_kv_heads, num_groups = key.shape[1], query.shape[1] // key.shape[1]
    # 1. Fold the heads of a group into queries.
    folded = fold(query, key)
    masks = mask.repeat(1, 1, num_groups, 1)[:, :, None].expand(-1, -1, num_kv_heads, -1, -1)
    # 2. Attend to each part.
    attend = torch.ops.outrider.attend_parts if len(query) > 1 and torch.compiler.is_compiling() else attend_parts
    outputs, lse = attend(folded, key, value, masks, head_dim**-0.5 if scale is None else scale)
    # 3. Merge the parts, in float32 at least: [batch, kv_head, folded, value_dim].
    output = (outputs * lse.softmax(1)[..., None]).sum(1)
    # 4. Undo the folding, with one copy: if the type changes, the second call copies nothing.
    output = output.unflatten(2, (num_groups, num_queries)).permute(0, 3, 1, 2, 4)
    return output.to(query.dtype, memory_format=torch.contiguous_format).contiguous().flatten(2, 3)


def attend_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the parts of the keys, each with a softmax of its own; also return the log-sum-exps.

    From [batch, kv_head, query, head_dim], [batch, kv_head, key, head_dim] and a mask [batch, part,
    kv_head, query, chunk] to [batch, part, kv_head, query, value_dim] and [batch, part, kv_head, query].
    """
    # Parts of several texts can't be one batch without a copy of the keys, so each text is a call.
    rows = [_attend_parts_of_text(*row, scale) for row in zip(query, key, value, mask, strict=True)]
    # The stack would be a copy.
    outputs, lse = (torch.stack(parts) if len(rows) > 1 else parts[0][None] for parts in zip(*rows, strict=True))
    return outputs, lse


def _attend_parts_of_text(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_parts = len(mask)
    keys, values = (states.unflatten(1, (num_parts, -1)).movedim(1, 0) for states in (key, value))
    return attention(query.expand(num_parts, -1, -1, -1), keys, values, mask, scale)


# For the compiler, which would make a graph for each number of texts.
_operator = torch.library.custom_op("outrider::attend_parts", attend_parts, mutates_args=())


@_operator.register_fake
def _shapes_of_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = query.new_empty(mask.shape[:4], dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_empty(*mask.shape[:4], value.shape[3]), lse
