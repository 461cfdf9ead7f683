"""Attention kernels that return the log-sum-exp of the scores, and their gradient.

Attention over many keys can be computed in parts, which are merged by their log-sum-exps.
`scaled_dot_product_attention` doesn't return them. So its kernels are called directly: the CPU's
flash attention, and CUDA's memory-efficient attention.
"""

import torch
from jaxtyping import Float
from torch.nn.functional import pad

Query = Float[torch.Tensor, "batch head query head_dim"]
Keys = Float[torch.Tensor, "batch kv_head key head_dim"]
Values = Float[torch.Tensor, "batch kv_head key value_dim"]
Output = Float[torch.Tensor, "batch head query value_dim"]
Mask = Float[torch.Tensor, "batch 1 query key"]
PreparedMask = Float[torch.Tensor, "batch _ folded key"]
LogSumExp = Float[torch.Tensor, "batch head query"]

MASK_ALIGNMENT = 8
"""Rows of a mask begin at multiples of so many elements: CUDA's kernel reads 16 bytes at a time."""
LSE_ALIGNMENT = 32
"""CUDA's kernel pads the queries of the log-sum-exp to a multiple of this number."""


def has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the device has a kernel that takes a mask and returns the log-sum-exp.

    `query` and `value` end in the width of a head. The CPU's kernel needs equal widths. CUDA's needs
    a type of at most 32 bits, and widths that are multiples of MASK_ALIGNMENT.
    """
    if on_cuda(query):
        return query.dtype != torch.float64 and query.shape[-1] % MASK_ALIGNMENT == value.shape[-1] % MASK_ALIGNMENT == 0
    return query.is_cpu and query.shape[-1] == value.shape[-1]


def on_cuda(tensor: torch.Tensor) -> bool:
    """Return whether CUDA's kernels are used for this tensor."""
    return tensor.is_cuda and torch.version.hip is None


def prepare_mask(mask: Mask, num_heads: int, num_kv_heads: int) -> PreparedMask:
    """Return the mask as the device's kernel reads it; `mask` is added to the scores.

    CUDA's kernel treats the queries of all heads that share a key as further queries of one head.
    The rows of its mask begin at multiples of MASK_ALIGNMENT.
    """
    if not on_cuda(mask):
        return mask
    num_keys = mask.shape[3]
    aligned = pad(mask, (0, -num_keys % MASK_ALIGNMENT)).repeat(1, 1, num_heads // num_kv_heads, 1)
    return aligned[..., :num_keys].expand(-1, num_kv_heads, -1, -1)


def attention(query: Query, key: Keys, value: Values, mask: PreparedMask, scale: float) -> tuple[Output, LogSumExp]:
    """Return the attention to `key`, and the log-sum-exp of the scores in float32."""
    if not on_cuda(query):
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scale)
        return output, lse
    folded = fold(query, key)
    output, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(folded, key, value, mask, True, scale=scale)
    lse = lse[..., : folded.shape[2]].reshape(query.shape[:3])
    return output.unflatten(2, (-1, query.shape[2])).flatten(1, 2), lse


def attention_gradient(
    grad: Output, query: Query, key: Keys, value: Values, mask: PreparedMask, output: Output, lse: LogSumExp, scale: float
) -> tuple[Query, Keys, Values]:
    """Return the gradients of query, key and value, for the softmax whose log-sum-exp is `lse`.

    `lse` and `output` may be those of more keys than `key` has: a kernel reads nothing else of a
    softmax. The gradients are then those of these keys' part.
    """
    if not on_cuda(query):
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse, 0.0, False, attn_mask=mask, scale=scale
        )
        return gradients[0], gradients[1], gradients[2]
    folded_lse = lse.reshape(*key.shape[:2], -1).float()
    # Queries that are padding have an infinite log-sum-exp, and so no weight.
    folded_lse = pad(folded_lse, (0, -folded_lse.shape[2] % LSE_ALIGNMENT), value=torch.inf)
    seed = torch.empty((), dtype=torch.long, device=query.device)  # of a dropout that isn't used
    gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        fold(grad, key),
        fold(query, key),
        key,
        value,
        mask,
        fold(output, key),
        folded_lse,
        seed,
        seed,
        0.0,
        [True, True, True, False],
        scale=scale,
    )
    return gradients[0].reshape(query.shape), gradients[1], gradients[2]


def fold(values: Float[torch.Tensor, "batch head query width"], key: Keys) -> Float[torch.Tensor, "batch kv_head folded width"]:
    """Treat the queries of all heads that share a key as further queries of one head."""
    batch, _, _, width = values.shape
    return values.reshape(batch, key.shape[1], -1, width)
