"""Attention of branches in training: an entry sees the text before its branch, and its own branch up to itself.

Under one mask over all entries each would be held against those of all other branches, for nothing: with a branch at every
position most of the work. Here text and own branch are attended to apart and merged by their log-sum-exp.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch.nn.functional import scaled_dot_product_attention

from ...target.tree_attention import attend_folded, hidden_score

Query = Float[torch.Tensor, "batch head branch head_dim"]
Text = Float[torch.Tensor, "batch kv_head seq head_dim"]
Seen = Bool[torch.Tensor, "batch 1 branch seq"]
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class Entries:
    """Keys and values of the texts, and of all branches depth by depth, in place of a cache: one depth more comes to them."""

    def __init__(self, text: KeysAndValues, own: Sequence[KeysAndValues] = ()) -> None:
        self.text = text
        self.own = list(own)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeysAndValues:
        """transformers' interface of a cache."""
        self.own.append((key_states, value_states))
        return key_states, value_states

    def attend(self, query: Query, seen: Seen, scale: float) -> Query:
        """The entries of the last depth, which see their own branch and, of the text, what is `seen`."""
        if query.device.type != "cpu":  # whose kernel alone takes a mask and hands out the log-sum-exp
            return attend_densely(query, self.text, self.own, seen, scale)
        # Not minus infinity: a branch may see nothing of the text.
        mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, hidden_score(query.dtype))
        keys, values = zip(*self.own, strict=True)
        output: torch.Tensor = _Apart.apply(query, *self.text, mask, scale, len(self.own), *keys, *values)
        return output


def attend_densely(query: Query, text: KeysAndValues, own: Sequence[KeysAndValues], seen: Seen, scale: float) -> Query:
    """The same under one mask over the text and all branches."""
    keys, values = (torch.cat(each, dim=2) for each in zip(text, *own, strict=True))
    num_branches = query.shape[2]
    of_own = torch.eye(num_branches, dtype=torch.bool, device=query.device).repeat(1, len(own))
    mask = torch.cat([seen, of_own.expand(len(query), 1, -1, -1)], dim=3)
    if query.shape[1] == keys.shape[1]:
        return scaled_dot_product_attention(query, keys, values, mask, scale=scale)
    return attend_folded(query, keys, values, mask, scale).transpose(1, 2)


class _Apart(torch.autograd.Function):
    """The kernel behind scaled_dot_product_attention for the text, plain operations for the few entries of the own branch.

    Its backward pass is made for a softmax over all keys that it is given. But it only asks for the output and the log-sum-exp
    of each query; with those of text and branch together it gives the text's part of the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Query, key: Text, value: Text, mask: torch.Tensor, scale: float, num_own: int, *own: torch.Tensor
    ) -> Query:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        of_text, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scale
        )
        grouped = _grouped(query, key)
        scores = torch.stack([(grouped * each[:, :, None]).sum(-1) for each in own[:num_own]]).flatten(2, 3) * scale
        total = torch.cat([lse[None], scores.to(lse.dtype)]).logsumexp(0)  # [batch, head, branch]
        output = _grouped(of_text * (lse - total).exp()[..., None].to(query.dtype), key)
        for weight, each in zip((scores - total).exp().to(query.dtype), own[num_own:], strict=True):
            output = torch.addcmul(output, _grouped(weight[..., None], key), each[:, :, None])
        output = output.flatten(1, 2)
        ctx.save_for_backward(query, key, value, mask, output, total, *own)
        ctx.scale, ctx.num_own = scale, num_own
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, output, total, *own = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, total, 0.0, False, attn_mask=mask, scale=ctx.scale
        )
        delta = _grouped((grad * output).sum(-1), key)  # [batch, kv_head, group, branch]
        grouped, grouped_grad, grouped_total = _grouped(query, key), _grouped(grad, key), _grouped(total, key)
        of_query = _grouped(of_query, key)
        of_own_keys, of_own_values = [], []
        for own_key, own_value in zip(own[: ctx.num_own], own[ctx.num_own :], strict=True):
            own_key, own_value = own_key[:, :, None], own_value[:, :, None]
            scores = (grouped * own_key).sum(-1) * ctx.scale
            probs = (scores - grouped_total).exp().to(query.dtype)
            of_scores = (probs * ((grouped_grad * own_value).sum(-1) - delta) * ctx.scale)[..., None]
            of_query = torch.addcmul(of_query, of_scores, own_key)
            of_own_keys.append((of_scores * grouped).sum(2))
            of_own_values.append((probs[..., None] * grouped_grad).sum(2))
        return of_query.flatten(1, 2), of_key, of_value, None, None, None, *of_own_keys, *of_own_values


def _grouped(values: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The heads that share a key side by side: [batch, head, ...] to [batch, kv_head, group, ...]."""
    return values.unflatten(1, (key.shape[1], -1))
