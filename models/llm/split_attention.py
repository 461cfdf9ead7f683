"""Attention with a mask over many keys, in parts that are merged by their log-sum-exps.

`scaled_dot_product_attention` doesn't return the log-sum-exp of the scores. So its kernels are
called directly: the CPU's flash attention, and CUDA's memory-efficient attention.

CUDA's kernel for masks gives a group of processors all keys of one key head. With one text and
eight key heads it leaves most of a large GPU idle. So the keys are split into parts, which the
kernel takes as further rows of a batch:

    keys of one text    [kv_head, key, width]
    as a batch          [part, kv_head, chunk, width]     the same memory

Each part has a softmax of its own. The kernel also returns each softmax's log-sum-exp; the parts'
outputs are summed with the weights that follow from these (flash-decoding does the same).

The result equals that of one softmax up to rounding. But rounding can change a token whose logits
are nearly tied. So the number of parts depends only on the device, the number of texts and the
number of columns, and plain decoding and all drafters share it.
"""

from functools import cache

import torch
from jaxtyping import Float
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from .tree_cache import TreeCache

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


SplitMask = Float[torch.Tensor, "batch part query chunk"]
MergedOutput = Float[torch.Tensor, "batch query head value_dim"]

MIN_KEYS = 1024
"""Attention to fewer keys is a small share of a pass, and isn't split."""
MAX_TEXTS = 4
"""With more texts, the kernel keeps a GPU busy without parts."""
MIN_KEYS_OF_PART = 128
"""A shorter part costs more to merge than it saves."""
MAX_PARTS = 32
"""An extent on an accelerator can be split into so many parts."""


def choose_num_parts(model: PreTrainedModel, cache: TreeCache) -> int:
    """Return the number of parts for the masked pass that began in a cache; 1 splits nothing.

    It is 1 without CUDA, and for layers whose attention can't read a mask in parts.
    """
    if not on_cuda(cache.lengths.device) or cache.extent < MIN_KEYS or cache.batch > MAX_TEXTS:
        return 1
    # Only layers that call our attention function can read a mask in parts.
    if not takes_our_attention(model.config.get_text_config()) or not model._supports_attention_backend:
        return 1
    layers = cache.states(1)
    # Layers that have read nothing have no keys. That is so if texts left a batch of another target and
    # came to this one; their first pass is whole.
    if not layers or not all(has_kernel(*layer) and layer[0].dtype == model.dtype for layer in layers):
        return 1
    return count_parts(num_processors(cache.lengths.device), cache.batch * layers[0][0].shape[1], cache.extent)


INDEXED = "indexed_attention"
"""transformers' name of layers that choose keys by an index."""


def takes_our_attention(config: PretrainedConfig) -> bool:
    """Return whether our attention may compute the masked layers of a text model in place of transformers' sdpa.

    Layers that choose keys by an index put their choice into the mask only for transformers' own names.
    """
    return config._attn_implementation == "sdpa" and INDEXED not in (getattr(config, "layer_types", None) or ())


def count_parts(num_processors: int, num_groups: int, num_keys: int) -> int:
    """Return the largest power of two of parts that a device computes at the same time.

    `num_groups` are the heads of keys of all texts. A group of processors computes each, if nothing
    is split.
    """
    most = min(MAX_PARTS, num_processors // num_groups, num_keys // MIN_KEYS_OF_PART)
    parts = 1 << max(most, 1).bit_length() - 1
    return parts if num_keys % (parts * MASK_ALIGNMENT) == 0 else 1


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def split_mask(mask: Float[torch.Tensor, "batch 1 query key"], num_parts: int) -> SplitMask:
    """Return a copy of a mask, for `attend_split`: the number of parts is in its shape.

    So compiled code serves all numbers of parts: it is made for any shape.
    """
    return mask.squeeze(1).unflatten(2, (num_parts, -1)).transpose(1, 2).contiguous()


def attend_split(query: Query, key: Keys, value: Values, mask: SplitMask, scale: float | None) -> MergedOutput:
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
