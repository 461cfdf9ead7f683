"""Attention of branches: continuations of many positions of texts, decoded in parallel.

A branch leaves its text after position i. At every step each branch has one query. The query
attends to the text's keys up to i (kept from the prefill, never copied), and to the keys of the
branch's earlier tokens. The two parts are computed separately and merged by their log-sum-exp. So
no branch sees another, and all branches share the text's keys. A sliding window hides the keys that
are too far back in both parts; an attention sink is one more part, without a value.

This works with every unmodified transformers model that routes its attention through
`AttentionInterface`. Inside `branch_attention(model)`, a forward pass with the argument `branches=`
reads all live branches as one row [1, branch] of tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...data.device import to_device
from ...models.llm.recurrent_states import find_mixers
from ...models.llm.split_attention import attention, has_kernel, prepare_mask
from ...models.llm.tree_attention import FULL, SLIDING, attention_kinds, expanded, hidden_score

IMPLEMENTATION = "outrider_branch"

# Queries per call. A small number wastes less work on masked keys; a large number makes fewer
# calls.
SEGMENT_QUERIES = 128

# Arguments of attention that change the scores, and that this module doesn't support.
UNSUPPORTED_ARGUMENTS = ("softcap", "position_bias")

REMEDY = "; set distill.branches=false, and labels end where the target disagrees with the text"
BYPASSED = f"some of the target's layers bypass transformers' AttentionInterface or Cache{REMEDY}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Neighbouring branches of one text, whose attention to the text is one call.

    They are branches `start` to `stop` of all live ones, and need `mask.shape[1]` keys of text `row`
    from `first_key` on. `mask` is added to the scores: zero up to the branch's position, minus
    infinity beyond.
    """

    row: int
    start: int
    stop: int
    mask: Float[torch.Tensor, "branch key"]
    first_key: int = 0

    @property
    def keys(self) -> slice:
        """The keys of the text that the branches need."""
        return slice(self.first_key, self.first_key + self.mask.shape[1])


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of all live branches, with their masks as a kernel reads them."""

    parts: list[Segment]
    _prepared: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def masks(self, num_heads: int, num_kv_heads: int, *, for_kernel: bool) -> list[torch.Tensor]:
        """Return the mask of each segment. Those for a kernel are made once for all layers of so many heads."""
        if not for_kernel:
            return [part.mask for part in self.parts]
        heads = (num_heads, num_kv_heads)
        if heads not in self._prepared:
            self._prepared[heads] = [prepare_mask(part.mask[None, None], *heads) for part in self.parts]
        return self._prepared[heads]


class BranchCache:
    """The live branches of a batch of texts, with keys and values of their tokens.

    `host_rows` and `host_positions` are each branch's text and the last position of the text that it
    sees, ordered by row, then position; `rows` and `positions` are the same on the device.
    `text_keys` and `text_values` [batch, kv_head, seq, head_dim] come from the prefill, one per
    layer. With latent attention they are the latents of keys and values (DeepSeek-V2, section 2.1).
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
        self.segments = Segments(make_segments(rows, positions, self.positions, self.text_keys[0].dtype))
        self._in_window: dict[int, tuple[int, Segments]] = {}

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

    def store(
        self,
        layer: int,
        key: Float[torch.Tensor, "branch kv_head head_dim"],
        value: Float[torch.Tensor, "branch kv_head value_dim"],
    ) -> int:
        """Store a step's keys and values; return the layer whose text they continue.

        The last layers of some models have no keys of their own: they get those of an earlier layer,
        whose text they read.
        """
        if layer < len(self.text_keys):
            self.own_keys[layer].append(key)
            self.own_values[layer].append(value)
            return layer
        given = key.data_ptr()
        for source, keys in enumerate(self.own_keys):
            if keys and keys[-1].data_ptr() == given:
                return source
        raise ValueError(BYPASSED)

    def attend(
        self,
        layer: int,
        query: Float[torch.Tensor, "branch head head_dim"],
        text: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        window: int | None = None,
        sinks: Float[torch.Tensor, " head"] | None = None,
    ) -> Float[torch.Tensor, "branch head value_dim"]:
        """Attend to keys and values of the texts, and to those of the branch, which `store` has stored.

        A query sees keys that are fewer than `window` positions back. `sinks` are scores that take
        weight from all others.
        """
        own_keys, own_values = self.own_keys[layer], self.own_values[layer]
        step = len(own_keys)
        # 1. Attend to the text, and compute the scores of the branch's tokens.
        text_output, text_lse = self._attend_to_text(query, *text, scale, self._segments(window, step))
        # Heads that share a key are grouped: [branch, kv_head, group, ...].
        groups = (own_keys[0].shape[1], query.shape[1] // own_keys[0].shape[1])
        grouped_query = query.unflatten(1, groups).to(text_lse.dtype)
        seen = 0 if window is None else max(0, step - window)  # the branch's first tokens may be too far back
        scores = [(grouped_query * own_key[:, :, None]).sum(-1) * scale for own_key in own_keys[seen:]]
        # 2. Merge the parts by a softmax over the text's log-sum-exp and the other scores.
        parts = [text_lse.unflatten(1, groups), *scores]
        if sinks is not None:
            parts.append(sinks.to(text_lse.dtype).view(groups).expand_as(parts[0]))
        weights = torch.stack(parts).softmax(0).to(query.dtype)[..., None]
        output = text_output.unflatten(1, groups) * weights[0]
        for weight, own_value in zip(weights[1 : 1 + len(scores)], own_values[seen:], strict=True):
            output = torch.addcmul(output, weight, own_value[:, :, None])
        return output.flatten(1, 2)

    def _attend_to_text(
        self,
        query: Float[torch.Tensor, "branch head head_dim"],
        keys: Float[torch.Tensor, "batch kv_head seq head_dim"],
        values: Float[torch.Tensor, "batch kv_head seq value_dim"],
        scale: float,
        segments: Segments,
    ) -> tuple[Float[torch.Tensor, "branch head value_dim"], Float[torch.Tensor, "branch head"]]:
        outputs, lses = [], []
        for_kernel = has_kernel(query, values)
        attend = attention_by_kernel if for_kernel else attention_with_lse
        masks = segments.masks(query.shape[1], keys.shape[1], for_kernel=for_kernel)
        for segment, mask in zip(segments.parts, masks, strict=True):
            output, lse = attend(
                query[segment.start : segment.stop].transpose(0, 1),
                keys[segment.row, :, segment.keys],
                values[segment.row, :, segment.keys],
                mask,
                scale,
            )
            outputs.append(output.transpose(0, 1))
            lses.append(lse.transpose(0, 1))
        return torch.cat(outputs), torch.cat(lses)

    def _segments(self, window: int | None, step: int) -> Segments:
        """Return the segments of a step with the keys that are in the window."""
        if window is None or not len(self.host_positions) or self.host_positions.max() + step < window:
            return self.segments
        if self._in_window.get(window, (0,))[0] != step:
            first_visible = self.positions + (step - window + 1)
            # Each branch keeps its last key, so that no score is left out for all.
            firsts = self.host_positions + min(step - window + 1, 0)
            parts = [_in_window(part, first_visible, int(firsts[part.start])) for part in self.segments.parts]
            self._in_window[window] = step, Segments(parts)
        return self._in_window[window][1]


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


def _in_window(segment: Segment, first_visible: Int[torch.Tensor, " branch"], first_key: int) -> Segment:
    """Return a segment that hides the keys before each branch's `first_visible`; none needs a key before `first_key`."""
    first_key = max(0, first_key)
    keys = torch.arange(first_key, segment.mask.shape[1], device=first_visible.device)
    is_far = keys < first_visible[segment.start : segment.stop, None]
    # The score is finite: a text that is wholly out of the window gets no weight, and no NaN.
    mask = segment.mask[:, first_key:].masked_fill(is_far, hidden_score(segment.mask.dtype))
    return Segment(row=segment.row, start=segment.start, stop=segment.stop, mask=mask, first_key=first_key)


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
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of branches by transformers' interface.

    Tensors are [1, head, branch, head_dim], the output [1, branch, head, value_dim].
    """
    if branches is None:
        raise ValueError(f"the target doesn't pass keyword arguments to its attention{REMEDY}")
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ValueError(f"the target's attention uses {name}, which branch attention doesn't support{REMEDY}")
    layer: Any = module.layer_idx
    layer = branches.store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    text = expanded(module, branches.text_keys[layer], branches.text_values[layer])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return branches.attend(layer, query[0].transpose(0, 1), text, scale, sliding_window, s_aux)[None], None


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


def require_plain_scores(model: PreTrainedModel) -> None:
    """Raise ValueError if the configuration shows that branches would be labelled wrongly.

    Each layer must attend to the text or to a window of it, with plain scores, and positions must come
    from position ids alone.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    if strange := attention_kinds(model).keys() - {FULL, SLIDING}:
        raise ValueError(f"{name} has layers of type {', '.join(sorted(strange))}, which branches can't read{REMEDY}")
    if find_mixers(model):
        raise ValueError(f"{name} has recurrent layers, which can't continue a text from many positions at once{REMEDY}")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(f"{name} caps its attention scores, which branch attention doesn't support{REMEDY}")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise ValueError(
            f"{name} encodes positions by a bias on the attention scores (ALiBi), which ignores position ids{REMEDY}"
        )
