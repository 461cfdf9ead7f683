"""Attention of branches: continuations of many positions of texts, decoded in parallel.

A branch leaves its text after position i. At every step each branch has one query. The query
attends to the text's keys up to i (kept from the prefill, never copied), and to the keys of the
branch's earlier tokens. The two parts are computed separately and merged by their log-sum-exp. So
no branch sees another, and all branches share the text's keys.

This works with every unmodified transformers model that routes its attention through
`AttentionInterface`. Inside `branch_attention(model)`, a forward pass with the argument `branches=`
reads all live branches as one row [1, branch] of tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...data.device import to_device
from ...models.llm.split_attention import attention, has_kernel, prepare_mask

IMPLEMENTATION = "outrider_branch"

# Queries per call. A small number wastes less work on masked keys; a large number makes fewer
# calls.
SEGMENT_QUERIES = 128

# Arguments of attention that change the scores, and that this module doesn't support.
UNSUPPORTED_ARGUMENTS = ("s_aux", "softcap", "position_bias")

BYPASSED = "some of the target's layers bypass transformers' AttentionInterface or Cache: outrider can't distil from it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Neighbouring branches of one text, whose attention to the text is one call.

    They are branches `start` to `stop` of all live ones, and need the first `mask.shape[1]` keys of
    text `row`. `mask` is added to the scores: zero up to the branch's position, minus infinity
    beyond.
    """

    row: int
    start: int
    stop: int
    mask: Float[torch.Tensor, "branch key"]


class BranchCache:
    """The live branches of a batch of texts, with keys and values of their tokens.

    `host_rows` and `host_positions` are each branch's text and the last position of the text that it
    sees, ordered by row, then position; `rows` and `positions` are the same on the device.
    `text_keys` and `text_values` [batch, kv_head, seq, head_dim] come from the prefill, one per
    layer.
    """

    def __init__(
        self,
        text_keys: Sequence[torch.Tensor],
        text_values: Sequence[torch.Tensor],
        rows: Int[np.ndarray, " branch"],
        positions: Int[np.ndarray, " branch"],
    ) -> None:
        self.text_keys = text_keys
        self.text_values = text_values
        self.own_keys: list[list[torch.Tensor]] = [[] for _ in text_keys]  # [layer][step]: [branch, kv_head, head_dim]
        self.own_values: list[list[torch.Tensor]] = [[] for _ in text_values]
        self._place(rows, positions)

    def _place(self, rows: Int[np.ndarray, " branch"], positions: Int[np.ndarray, " branch"]) -> None:
        """Store the branches' places, here and on the device."""
        device = self.text_keys[0].device
        self.host_rows, self.host_positions = rows, positions
        self.rows, self.positions = to_device(rows, device), to_device(positions, device)
        self.segments = make_segments(rows, positions, self.positions, self.text_keys[0].dtype)
        self._masks: dict[tuple[int, ...], list[torch.Tensor]] = {}

    @property
    def num_steps(self) -> int:
        """Number of tokens that every branch has read. Raises ValueError if layers disagree."""
        steps = {len(keys) for keys in self.own_keys}
        if len(steps) != 1:
            raise ValueError(BYPASSED)
        return steps.pop()

    def keep(self, kept: Int[np.ndarray, " kept"]) -> Int[torch.Tensor, " kept"]:
        """Drop all branches except those at the ascending indexes `kept`; return these on the device."""
        self._place(self.host_rows[kept], self.host_positions[kept])
        moved = to_device(kept, self.rows.device)
        for per_layer in (self.own_keys, self.own_values):
            for per_step in per_layer:
                per_step[:] = [tensor[moved] for tensor in per_step]
        return moved

    def attend(
        self,
        layer: int,
        query: Float[torch.Tensor, "branch head head_dim"],
        key: Float[torch.Tensor, "branch kv_head head_dim"],
        value: Float[torch.Tensor, "branch kv_head value_dim"],
        scale: float,
    ) -> Float[torch.Tensor, "branch head value_dim"]:
        """Run one step in one layer: store new keys and values, then attend to text and branch."""
        # 1. Store.
        self.own_keys[layer].append(key)
        self.own_values[layer].append(value)
        # 2. Attend to the text, and compute the scores of the branch's tokens.
        text_output, text_lse = self._attend_to_text(layer, query, scale)
        # Heads that share a key are grouped: [branch, kv_head, group, ...].
        groups = (key.shape[1], query.shape[1] // key.shape[1])
        grouped_query = query.unflatten(1, groups).to(text_lse.dtype)
        scores = [(grouped_query * own_key[:, :, None]).sum(-1) * scale for own_key in self.own_keys[layer]]
        # 3. Merge both parts by a softmax over the text's log-sum-exp and the branch's scores.
        weights = torch.stack([text_lse.unflatten(1, groups), *scores]).softmax(0).to(query.dtype)[..., None]
        output = text_output.unflatten(1, groups) * weights[0]
        for weight, own_value in zip(weights[1:], self.own_values[layer], strict=True):
            output = torch.addcmul(output, weight, own_value[:, :, None])
        return output.flatten(1, 2)

    def _attend_to_text(
        self, layer: int, query: Float[torch.Tensor, "branch head head_dim"], scale: float
    ) -> tuple[Float[torch.Tensor, "branch head value_dim"], Float[torch.Tensor, "branch head"]]:
        outputs, lses = [], []
        keys, values = self.text_keys[layer], self.text_values[layer]
        attend, masks = attention_with_lse, [segment.mask for segment in self.segments]
        if has_kernel(query, values):
            attend, masks = attention_by_kernel, self._prepared_masks(query.shape[1], keys.shape[1])
        for segment, mask in zip(self.segments, masks, strict=True):
            num_keys = segment.mask.shape[1]
            output, lse = attend(
                query[segment.start : segment.stop].transpose(0, 1),
                keys[segment.row, :, :num_keys],
                values[segment.row, :, :num_keys],
                mask,
                scale,
            )
            outputs.append(output.transpose(0, 1))
            lses.append(lse.transpose(0, 1))
        return torch.cat(outputs), torch.cat(lses)

    def _prepared_masks(self, *heads: int) -> list[torch.Tensor]:
        """Return the segments' masks as a kernel reads them, once for all layers of so many heads."""
        if heads not in self._masks:
            self._masks[heads] = [prepare_mask(segment.mask[None, None], *heads) for segment in self.segments]
        return self._masks[heads]


def make_segments(
    rows: Int[np.ndarray, " branch"],
    positions: Int[np.ndarray, " branch"],
    on_device: Int[torch.Tensor, " branch"],
    dtype: torch.dtype,
) -> list[Segment]:
    """Cut branches, ordered by row and position, into segments of SEGMENT_QUERIES branches.

    A segment belongs to one row. `on_device` are the positions there. Example with SEGMENT_QUERIES =
    2: rows 0 0 0 1 and positions 3 4 9 2 give the segments (3 4), (9), (2), which read the first 5,
    10 and 3 keys of their rows.
    """
    segments, start = [], 0
    for row, count in enumerate(np.bincount(rows).tolist()):
        row_stop = start + count
        while start < row_stop:
            stop = min(start + SEGMENT_QUERIES, row_stop)
            keys = torch.arange(int(positions[stop - 1]) + 1, device=on_device.device)
            beyond = keys > on_device[start:stop, None]
            mask = torch.zeros(beyond.shape, dtype=dtype, device=on_device.device).masked_fill_(beyond, float("-inf"))
            segments.append(Segment(row=row, start=start, stop=stop, mask=mask))
            start = stop
    return segments


def attention_by_kernel(
    query: Float[torch.Tensor, "head query head_dim"],
    key: Float[torch.Tensor, "kv_head key head_dim"],
    value: Float[torch.Tensor, "kv_head key value_dim"],
    mask: Float[torch.Tensor, "1 _ folded key"],
    scale: float,
) -> tuple[Float[torch.Tensor, "head query value_dim"], Float[torch.Tensor, "head query"]]:
    """Compute attention and the log-sum-exp of its scores by a kernel; see `prepare_mask`."""
    output, lse = attention(query[None], key[None], value[None], mask, scale)
    return output[0], lse[0]


def attention_with_lse(
    query: Float[torch.Tensor, "head query head_dim"],
    key: Float[torch.Tensor, "kv_head key head_dim"],
    value: Float[torch.Tensor, "kv_head key value_dim"],
    mask: Float[torch.Tensor, "query key"],
    scale: float,
) -> tuple[Float[torch.Tensor, "head query value_dim"], Float[torch.Tensor, "head query"]]:
    """Compute attention and the log-sum-exp of its scores by plain operations.

    Used if no kernel returns both. Scores, softmax and log-sum-exp are float32 or wider. Query
    heads are grouped by their shared key head.
    """
    num_heads, num_queries = query.shape[:2]
    grouped_query = query.reshape(key.shape[0], -1, query.shape[-1])  # [kv_head, group * query, head_dim]
    scores = (grouped_query @ key.transpose(1, 2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    scores = scores.view(num_heads, num_queries, -1) + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(value.dtype)
    output = weights.view(key.shape[0], -1, scores.shape[-1]) @ value
    return output.view(num_heads, num_queries, -1), lse


def _branch_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    branches: BranchCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of branches by transformers' interface.

    Tensors are [1, head, branch, head_dim], the output [1, branch, head, value_dim].
    """
    if branches is None:
        raise ValueError("the target doesn't pass keyword arguments to its attention: outrider can't distil from it")
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"the target's attention uses {name}, which branch attention doesn't support: outrider can't distil from it"
            )
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = branches.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale)
    return output[None], None


# Without a mask function of the same name, transformers builds no mask; the segments carry our
# masks.
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _branch_attention_forward)


@contextmanager
def branch_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch `model` to branch attention inside the block, and back afterwards, even on errors."""
    config = model.config.get_text_config()
    previous_implementation = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = previous_implementation


def require_full_attention(model: PreTrainedModel, num_tokens: int) -> None:
    """Raise ValueError if the configuration shows that branches would be labelled wrongly.

    Each layer must attend to the whole text of `num_tokens` tokens with plain scores, and positions
    must come from position ids alone.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if strange := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{name} has layers of type {', '.join(sorted(strange))}; only full attention can be distilled")
    if window is not None and window < num_tokens and kinds != {"full_attention"}:
        raise ValueError(
            f"{name} attends to a sliding window of {window} tokens, and texts may have {num_tokens}; "
            "lower data.max_length so that they fit into the window"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(f"{name} caps its attention scores, which branch attention doesn't support")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise ValueError(f"{name} encodes positions by a bias on the attention scores (ALiBi), which ignores position ids")
