"""Draft trees for an unmodified model: 4-D masks and position ids, nothing else.

A 4-D mask replaces the model's mask in every layer. So each kind of layer (full attention, sliding
window) gets a mask of its kind. The model must derive positions from masks and position ids alone.
`require_tree_attention` raises for models whose configuration shows another way; the target's probe
finds the others (see `HFTarget`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..decoding.tree import depths
from ..decoding.types import NO_NODE
from .split_attention import INDEXED, attend_split, split_mask, takes_our_attention

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Kinds of attention layers, by transformers' names; a further one is INDEXED."""
STATE_KINDS = {"linear_attention": None, "conv": None, "hybrid": FULL}
"""Kinds of layers with a recurrent state, and the attention that they have beside it."""
TOKEN_KINDS = {"mlp", "moe"}
"""Kinds of layers that read each token alone."""
KINDS_WITHOUT_MASK = (*TOKEN_KINDS, "linear_attention", "conv", "mamba")
"""Kinds of layers that look a mask up by their name, where there are several, and need none."""
BIASED_MODELS = ("bloom", "mpt")
MODELS_WITH_OWN_CACHE = ("minimax",)
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")

Mask = Float[torch.Tensor, "batch 1 query key"]


def attention_kinds(model: PreTrainedModel) -> dict[str, int | None]:
    """Return the kinds of attention layers, by transformers' names, and the window or chunk of each.

    None stands for the whole text. Layers with a recurrent state or of one token each need no mask. A
    model that has no others gets the mask of full attention, which it ignores.
    Raises ValueError for a kind that can't read a draft tree.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or (SLIDING if window is not None else FULL,))
    kinds = {STATE_KINDS.get(kind, kind) for kind in kinds - TOKEN_KINDS} - {None} or {FULL}
    if strange := kinds - {FULL, SLIDING, CHUNKED, INDEXED}:
        raise ValueError(
            f"{type(model).__name__} has layers of type {', '.join(sorted(strange))}, and draft trees can't be read with them. "
            "Choose another target"
        )
    reaches = {SLIDING: window, CHUNKED: getattr(config, "attention_chunk_size", None)}
    return {kind: reaches.get(kind) for kind in sorted(kinds)}


def keeps_keys(model: PreTrainedModel) -> list[bool]:
    """Return for each layer whether it has keys and values."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    return [kind not in KINDS_WITHOUT_MASK for kind in kinds]


def has_only_attention(model: PreTrainedModel) -> bool:
    """Return whether all layers read keys and values of the text, and nothing else of it."""
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ()) <= {FULL, SLIDING, CHUNKED}


def require_tree_attention(model: PreTrainedModel) -> None:
    """Raise ValueError if the configuration shows that draft trees would be verified wrongly."""
    # 1. Kinds of layers.
    attention_kinds(model)
    config = model.config.get_text_config()
    name = type(model).__name__
    # 2. Models that address the cache by column, not by position.
    if hasattr(config, "attention_types"):
        raise ValueError(
            f"{name} cuts windows by cache column, not by position ids, so trees and batches would go wrong. "
            "Choose another target"
        )
    if hasattr(config, "keep_window_size"):
        raise ValueError(
            f"{name} chooses the cache columns that it reads by their number, so trees and batches would go wrong. "
            "Choose another target"
        )
    if config.model_type in MODELS_WITH_OWN_CACHE:
        raise ValueError(f"{name} reads no cache but its own kind, which can't hold a draft tree. Choose another target")
    # 3. Models whose positions depend on other tokens of the pass, or don't come from position ids.
    if (kind := _length_dependent_rope(config)) is not None:
        raise ValueError(
            f"{name} chooses its rotary frequencies ({kind}) by the longest position in a pass, so a draft node or another row "
            "of the batch would change them. Choose another target, or a configuration that stays within the original length"
        )
    if getattr(config, "alibi", False) or config.model_type in BIASED_MODELS:
        raise ValueError(
            f"{name} encodes positions by a bias on the attention scores (ALiBi), which ignores position ids. "
            "Choose another target"
        )
    # 4. Attention functions that would ignore a part of the computation.
    if getattr(config, "attn_logit_softcapping", None) is not None and model.config._attn_implementation != "eager":
        raise ValueError(
            f"{name} caps its attention scores, and with a mask only transformers' eager attention does that; "
            "set target.attn_implementation to eager"
        )


def _length_dependent_rope(config: Any) -> str | None:
    """Return the rotary embedding's kind if it depends on the text's length, else None.

    Such an embedding counts only if the context is longer than the original length.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        kind = rope.get("rope_type")
        if kind not in LENGTH_DEPENDENT_ROPES:
            continue
        original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if original is None or config.max_position_embeddings > original:
            return str(kind)
    return None


def tree_attention_mask(
    lineage: Int[torch.Tensor, "batch node depth"],
    lengths: Int[torch.Tensor, " batch"],
    extent: int,
    dtype: torch.dtype,
    window: int | None = None,
    queries: slice = slice(None),
    *,
    chunk: int | None = None,
) -> Mask:
    """Return the additive mask of the last committed token and the nodes over `extent` columns.

    Row b's first `lengths[b]` cache columns are its committed text; the next columns are the
    queries themselves. All queries see the committed text and the last token. A node also sees
    itself and its ancestors. With `window`, a query sees only keys that are fewer than `window`
    positions back; with `chunk`, only those in its own chunk of so many positions. The mask is
    additive, because both the sdpa and the eager attention of transformers accept that form.

    Of the last committed token and the nodes, only the `queries` get a row. The mask is always new
    memory, not a slice of a larger mask: kernels on a GPU read masks in words of several bytes, and
    the mask must start at a multiple of that size.
    """
    batch, num_nodes, _ = lineage.shape
    # 1. What each query adds to the scores of: the committed text (column 0), the last token (1),
    # the nodes (2 and up), unwritten columns (the last).
    hidden = hidden_score(dtype)
    lines = pad(lineage, (0, 0, 1, 0), value=NO_NODE)[:, queries]  # the last token has no ancestors
    added = torch.full((batch, lines.shape[1], num_nodes + 3), hidden, dtype=dtype, device=lineage.device)
    added[:, :, :2] = 0
    # NO_NODE is the last token's column, which all queries see anyway.
    added[:, :, 1:].scatter_(2, lines + 1, 0)
    # 2. Look these scores up for each cache column. `offset` is 0 and less where text is committed.
    offset = torch.arange(1, extent + 1, device=lengths.device) - lengths[:, None]  # [batch, key]
    mask = added.gather(2, offset.clamp(0, num_nodes + 2)[:, None].expand(-1, added.shape[1], -1))
    # 3. Hide keys outside the window or chunk. Positions count from the last committed token, which is at 0.
    if window is not None or chunk is not None:
        depth = pad(depths(lineage), (1, 0))  # [batch, query]
        key_position = torch.where(offset <= 0, offset - 1, depth.gather(1, (offset - 1).clamp(0, num_nodes)))[:, None]
        position = depth[:, queries, None]
        if window is not None:
            mask.masked_fill_(position - key_position >= window, hidden)
        if chunk is not None:
            first = lengths[:, None, None]
            mask.masked_fill_((first + position) // chunk != (first + key_position) // chunk, hidden)
    return mask[:, None]


def hidden_score(dtype: torch.dtype) -> float:
    """Return the value that an additive mask adds to the score of a hidden key.

    It is half of the smallest number. Kernels multiply the masked score by log2(e), which would
    turn the smallest number into minus infinity. A block of keys that are all hidden (which a
    sliding window has) would then give NaN.
    """
    return torch.finfo(dtype).min / 2


def visible_columns(
    related: Bool[torch.Tensor, "batch query entry"], lengths: Int[torch.Tensor, " batch"], extent: int
) -> Bool[torch.Tensor, "batch query key"]:
    """Mark which of `extent` cache columns each query sees.

    A query sees the committed columns, and the `related` entries after them.
    """
    column = torch.arange(extent, device=lengths.device) - lengths[:, None]  # [batch, key]: negative where committed
    num_entries = related.shape[2]
    entry = column.clamp(0, num_entries - 1)[:, None].expand(-1, related.shape[1], -1)
    visible = related.gather(2, entry) & (column < num_entries)[:, None]
    return visible | (column < 0)[:, None]


def masks_by_kind(
    kinds: dict[str, int | None],
    lineage: Int[torch.Tensor, "batch node depth"],
    lengths: Int[torch.Tensor, " batch"],
    extent: int,
    dtype: torch.dtype,
    queries: slice = slice(None),
    num_parts: int = 1,
) -> Any:
    """Return the mask of each kind of layer: one tensor, or a dictionary of several.

    transformers' models take both forms. Only the `queries` get a row (see `tree_attention_mask`).
    With `num_parts`, the masks are for keys in so many parts (see `split_mask`).
    """
    masks = {}
    for kind, window in kinds.items():
        reach = window if window is not None and window < extent else None
        if kind == CHUNKED:
            mask = tree_attention_mask(lineage, lengths, extent, dtype, None, queries, chunk=reach)
        else:
            mask = tree_attention_mask(lineage, lengths, extent, dtype, reach, queries)
        masks[kind] = split_mask(mask, num_parts) if num_parts > 1 else mask
    return masks if len(masks) > 1 else next(iter(masks.values()))


# --- attention over grouped heads

IMPLEMENTATION = f"{__name__}.grouped_heads"
"""A package's copy of this module, perhaps an older one, registers its function by another name."""


def _grouped_heads_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention by transformers' interface, without repeating keys for each head.

    `query` is [batch, head, query, head_dim]; `key` and `value` have fewer heads. A mask over fewer
    keys is one for keys in parts. Without a mask a single query sees all keys.
    """
    if attention_mask is not None and attention_mask.shape[3] < key.shape[2]:
        return attend_split(query, key, value, attention_mask, scaling), None
    num_groups = query.shape[1] // key.shape[1]
    special = (name for name in ("softcap", "position_bias", "cache") if kwargs.get(name) is not None)
    sees_all = attention_mask is None and query.is_cpu and query.shape[2] == 1
    has_one_mask = attention_mask is not None and attention_mask.shape[1] == 1
    if not (sees_all or has_one_mask) or num_groups == 1 or any(special):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    attend = attend_grouped if has_grouped_kernel(query) else attend_folded
    return attend(query, key, value, attention_mask, scaling), None


FEW_QUERIES = 8
"""So few queries are folded on a CPU. For more, its two kernels take the same time."""


def has_grouped_kernel(query: torch.Tensor) -> bool:
    """Return whether the device has a fast kernel for a mask, grouped heads and these queries.

    The CPU's makes a matrix product of each head's queries, which is slow for few of them, and very slow
    for one in 16 bits: three to nine times as slow as folding, with 3 to 8 heads in a group. On CUDA cuDNN's
    kernel supports both, but makes a new plan for every shape (see `turn_off_cudnn_attention`). Folding also
    fills a GPU's tiles better: the queries of a group's heads together are one matrix product.
    """
    num_queries, is_wide = query.shape[2], query.dtype.itemsize >= 4
    return query.device.type == "cpu" and (num_queries > FEW_QUERIES or (num_queries == 1 and is_wide))


def attend_grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Attend with a kernel that supports grouped heads: keys have fewer heads than queries.

    From [batch, head, query, head_dim] and [batch, kv_head, key, head_dim] to [batch, query, head,
    head_dim].
    """
    return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True).transpose(1, 2).contiguous()


def attend_folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Compute `attend_grouped` with a kernel that doesn't support grouped heads.

    The heads of a group read the same keys, so their queries are treated as further queries of one
    head.
    """
    batch, num_heads, num_queries, _ = query.shape
    num_groups = num_heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], num_groups * num_queries, -1)
    folded_mask = None if mask is None else mask.repeat(1, 1, num_groups, 1)
    output = scaled_dot_product_attention(folded, key, value, folded_mask, scale=scale)
    # Kernels return outputs of different layouts: CUDA's memory-efficient kernel returns [batch,
    # query, head] transposed. So dimensions are only split and moved here, never merged, and one
    # copy puts them in order.
    output = output.unflatten(2, (num_groups, num_queries)).permute(0, 3, 1, 2, 4)
    return output.reshape(batch, num_queries, num_heads, -1).contiguous()


def expanded(attention: nn.Module, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values that an attention reads of those in its cache, which may be latents."""
    expand: Any = getattr(attention, "expand_kv", None)
    return (keys, values) if expand is None else expand(keys, values)


# Where this name is used a mask is passed, or there is nothing to hide: so it needs no mask function.
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _grouped_heads_forward)


@contextmanager
def grouped_heads(model: PreTrainedModel) -> Iterator[None]:
    """Make masked sdpa attention not repeat keys and values for heads, inside the block.

    With a mask, transformers repeats keys and values for every head of a group. That multiplies the
    cache's memory traffic by the group's size, for example by four.
    """
    config = model.config.get_text_config()
    implementation = config._attn_implementation
    if takes_our_attention(config):
        config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = implementation
