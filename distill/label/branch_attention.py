"""Attention of branches: one-token-at-a-time continuations of many positions of the same texts, decoded side by side.

A branch leaves its text after position i. At every step each branch has one query, which attends to the text's own keys up to
i (kept from the prefill, never copied) and to the keys of its own earlier tokens. The two parts are computed apart and merged
by their log-sum-exp, so that no branch sees another and the text's keys are shared by all.

Works with any transformers model that routes its attention through `AttentionInterface`, unmodified: inside
`branch_attention(model)`, a forward pass that is given `branches=` reads all live branches as one row [1, branch] of tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATION = "outrider_branch"

# Queries per call: small, and fewer keys beyond a query's own position are read in vain; large, and there are fewer calls.
SEGMENT_QUERIES = 128

# What a model may ask of its attention that changes the scores, and that we don't compute.
UNSUPPORTED_ARGUMENTS = ("s_aux", "softcap", "position_bias")

BYPASSED = "some of the target's layers bypass transformers' AttentionInterface or Cache: outrider can't distil from it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Neighbouring branches of one text, whose prefix attention is one call.

    They are branches `start` to `stop` of all live ones, and need the first `mask.shape[1]` keys of text `row`. `mask` is
    added to the scores: zero up to the branch's own position, minus infinity beyond.
    """

    row: int
    start: int
    stop: int
    mask: Float[torch.Tensor, "branch key"]


class BranchCache:
    """The live branches of a batch of texts: where they left, and the keys and values of their own tokens in every layer.

    `rows` and `positions` [branch] say which text a branch belongs to and the last position of it that it sees, ordered by
    row, then position. `text_keys` and `text_values` [batch, kv_head, seq, head_dim] are the prefill's, one per layer.
    """

    def __init__(
        self,
        text_keys: Sequence[torch.Tensor],
        text_values: Sequence[torch.Tensor],
        rows: Int[torch.Tensor, " branch"],
        positions: Int[torch.Tensor, " branch"],
    ) -> None:
        self.text_keys = text_keys
        self.text_values = text_values
        self.own_keys: list[list[torch.Tensor]] = [[] for _ in text_keys]  # [layer][step]: [branch, kv_head, head_dim]
        self.own_values: list[list[torch.Tensor]] = [[] for _ in text_values]
        self.rows = rows
        self.positions = positions
        self.segments = make_segments(rows, positions, text_keys[0].dtype)

    @property
    def num_steps(self) -> int:
        """Tokens that every branch has read, in all layers. Raises ValueError where a layer did not come by here."""
        steps = {len(keys) for keys in self.own_keys}
        if len(steps) != 1:
            raise ValueError(BYPASSED)
        return steps.pop()

    def keep(self, kept: Int[torch.Tensor, " kept"]) -> None:
        """Forget all branches but those at the ascending indexes `kept`."""
        self.rows, self.positions = self.rows[kept], self.positions[kept]
        for per_layer in (self.own_keys, self.own_values):
            for per_step in per_layer:
                per_step[:] = [tensor[kept] for tensor in per_step]
        self.segments = make_segments(self.rows, self.positions, self.text_keys[0].dtype)

    def attend(
        self,
        layer: int,
        query: Float[torch.Tensor, "branch head head_dim"],
        key: Float[torch.Tensor, "branch kv_head head_dim"],
        value: Float[torch.Tensor, "branch kv_head value_dim"],
        scale: float,
    ) -> Float[torch.Tensor, "branch head value_dim"]:
        """One step in one layer: remember each branch's new key and value, then attend to its text and to its own tokens."""
        self.own_keys[layer].append(key)
        self.own_values[layer].append(value)
        text_output, text_lse = self._attend_to_text(layer, query, scale)
        # The heads that share a key, [branch, kv_head, group, ...].
        groups = (key.shape[1], query.shape[1] // key.shape[1])
        grouped_query = query.unflatten(1, groups).to(text_lse.dtype)
        scores = [(grouped_query * own_key[:, :, None]).sum(-1) * scale for own_key in self.own_keys[layer]]
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
        # The kernel takes one width for keys and values.
        attend = _flash_attention_cpu if query.is_cpu and keys.shape[-1] == values.shape[-1] else attention_with_lse
        for segment in self.segments:
            num_keys = segment.mask.shape[1]
            output, lse = attend(
                query[segment.start : segment.stop].transpose(0, 1),
                keys[segment.row, :, :num_keys],
                values[segment.row, :, :num_keys],
                segment.mask,
                scale,
            )
            outputs.append(output.transpose(0, 1))
            lses.append(lse.transpose(0, 1))
        return torch.cat(outputs), torch.cat(lses)


def make_segments(
    rows: Int[torch.Tensor, " branch"], positions: Int[torch.Tensor, " branch"], dtype: torch.dtype
) -> list[Segment]:
    """Cut branches, ordered by row and position, into segments of one row and at most SEGMENT_QUERIES branches.

    For example, with SEGMENT_QUERIES = 2, rows 0 0 0 1 and positions 3 4 9 2 give the segments (3 4), (9), (2), which read
    the first 5, 10 and 3 keys of their rows.
    """
    segments, start = [], 0
    ends = positions.tolist()
    for row, count in enumerate(torch.bincount(rows).tolist()):
        row_stop = start + count
        while start < row_stop:
            stop = min(start + SEGMENT_QUERIES, row_stop)
            keys = torch.arange(ends[stop - 1] + 1, device=positions.device)
            beyond = keys > positions[start:stop, None]
            mask = torch.zeros(beyond.shape, dtype=dtype, device=positions.device).masked_fill_(beyond, float("-inf"))
            segments.append(Segment(row=row, start=start, stop=stop, mask=mask))
            start = stop
    return segments


def _flash_attention_cpu(
    query: Float[torch.Tensor, "head query head_dim"],
    key: Float[torch.Tensor, "kv_head key head_dim"],
    value: Float[torch.Tensor, "kv_head key head_dim"],
    mask: Float[torch.Tensor, "query key"],
    scale: float,
) -> tuple[Float[torch.Tensor, "head query head_dim"], Float[torch.Tensor, "head query"]]:
    # The kernel behind scaled_dot_product_attention, called directly because only so it hands out the log-sum-exp. It reads
    # grouped heads as they are.
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], key[None], value[None], attn_mask=mask[None, None], scale=scale
    )
    return output[0], lse[0]


def attention_with_lse(
    query: Float[torch.Tensor, "head query head_dim"],
    key: Float[torch.Tensor, "kv_head key head_dim"],
    value: Float[torch.Tensor, "kv_head key value_dim"],
    mask: Float[torch.Tensor, "query key"],
    scale: float,
) -> tuple[Float[torch.Tensor, "head query value_dim"], Float[torch.Tensor, "head query"]]:
    """Attention and the log-sum-exp of its scores, in plain operations, where no kernel gives both.

    Scores, softmax and log-sum-exp are float32 or wider. Query heads are grouped by the key head that they share.
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
    """transformers' attention interface: tensors are [1, head, branch, head_dim], the output [1, branch, head, value_dim]."""
    if branches is None:
        raise ValueError("the target does not pass keyword arguments on to its attention: outrider can't distil from it")
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"the target's attention uses {name}, which branch attention does not compute: outrider can't distil from it"
            )
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = branches.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale)
    return output[None], None


# No mask function under the same name: without one, transformers builds no mask, and the segments carry ours.
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _branch_attention_forward)


@contextmanager
def branch_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch `model` to branch attention inside the block, and back to its own afterwards, also on errors."""
    config = model.config.get_text_config()
    own_implementation = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = own_implementation


def require_full_attention(model: PreTrainedModel, num_tokens: int) -> None:
    """Raise ValueError where the configuration tells that branches of texts of `num_tokens` would be labelled wrongly.

    Each layer must attend to the whole text with plain scores, and nothing but position ids may tell it where a token stands.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if strange := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{name} has layers of type {', '.join(sorted(strange))}; only full attention can be distilled")
    if window is not None and window < num_tokens and kinds != {"full_attention"}:
        raise ValueError(
            f"{name} attends to a sliding window of {window} tokens, and {num_tokens} are asked for; "
            "lower data.max_length so that all of it fits the window"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(f"{name} caps its attention scores, which the attention of branches can't reproduce")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise ValueError(f"{name} tells positions by a bias on the attention scores (ALiBi), which ignores position ids")
