"""Attention of branches in training: an entry sees its text, and its branch up to itself.

One mask over all entries would compare each entry with all other branches, without need. With a
branch at every position, that would be most of the work. Here attention to the text and to the
branch are computed separately, and merged by their log-sum-exp.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch.nn.functional import scaled_dot_product_attention

from ...target.attention_kernels import attention, attention_gradient, has_kernel, prepare_mask
from ...target.tree_attention import attend_folded, hidden_score

Query = Float[torch.Tensor, "batch head branch head_dim"]
Text = Float[torch.Tensor, "batch kv_head seq head_dim"]
Visible = Bool[torch.Tensor, "batch 1 branch seq"]
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class Entries:
    """Keys and values of texts, and of branches by depth; replaces a cache in training."""

    def __init__(self, text: KeysAndValues, branches: Sequence[KeysAndValues] = ()) -> None:
        self.text = text
        self.branches = list(branches)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeysAndValues:
        """Append the keys and values of one more depth (transformers' interface of a cache)."""
        self.branches.append((key_states, value_states))
        return key_states, value_states

    def attend(self, query: Query, visible: Visible, scale: float) -> Query:
        """Attend from the last depth's entries to their branch and to the `visible` text."""
        if not has_kernel(query, self.text[1]):
            return attend_densely(query, self.text, self.branches, visible, scale)
        # A finite score, not minus infinity: a branch may see nothing of the text.
        mask = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, hidden_score(query.dtype))
        mask = prepare_mask(mask, query.shape[1], self.text[0].shape[1])
        keys, values = zip(*self.branches, strict=True)
        output: torch.Tensor = _SplitAttention.apply(query, *self.text, mask, scale, len(self.branches), *keys, *values)
        return output


class Slots(Entries):
    """Keys and values of texts, and of branches whose entries are all read in one pass.

    An entry sees all entries of its branch, also those after it: the slots of a block. Entry n of
    slot k is query k * branches + n.
    """

    def __init__(self, text: KeysAndValues, num_slots: int) -> None:
        super().__init__(text)
        self.num_slots = num_slots

    def attend(self, query: Query, visible: Visible, scale: float) -> Query:
        """Attend from all slots to the slots of their branch and to the `visible` text."""
        ((keys, values),) = self.branches
        if not has_kernel(query, self.text[1]):
            return attend_densely(query, self.text, self.branches, visible, scale, num_slots=self.num_slots)
        # Every slot sees slot j of its branch, as an entry sees depth j of its branch in `Entries`.
        key_slots, value_slots = (
            [slot.repeat(1, 1, self.num_slots, 1) for slot in entries.chunk(self.num_slots, dim=2)]
            for entries in (keys, values)
        )
        return Entries(self.text, list(zip(key_slots, value_slots, strict=True))).attend(query, visible, scale)


def attend_densely(
    query: Query,
    text: KeysAndValues,
    branches: Sequence[KeysAndValues],
    visible: Visible,
    scale: float,
    *,
    num_slots: int = 1,
) -> Query:
    """Compute `Entries.attend` with one mask over the text and all branches.

    With `num_slots`, compute `Slots.attend`.
    """
    keys, values = (torch.cat(tensors, dim=2) for tensors in zip(text, *branches, strict=True))
    num_branches = query.shape[2] // num_slots
    same_branch = torch.eye(num_branches, dtype=torch.bool, device=query.device)
    same_branch = same_branch.repeat(num_slots, len(branches) * num_slots)
    mask = torch.cat([visible, same_branch.expand(len(query), 1, -1, -1)], dim=3)
    if query.shape[1] == keys.shape[1]:
        return scaled_dot_product_attention(query, keys, values, mask, scale=scale)
    return attend_folded(query, keys, values, mask, scale).transpose(1, 2)


class _SplitAttention(torch.autograd.Function):
    """Attention to the text by a fused kernel, and to the branch by plain operations.

    The kernel's backward pass assumes a softmax over exactly the keys that it gets. But it only
    reads the output and the log-sum-exp of each query. With those of text and branch together, it
    returns the text's part of the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Query, key: Text, value: Text, mask: torch.Tensor, scale: float, num_depths: int, *branch: torch.Tensor
    ) -> Query:
        # 1. The text, by the kernel.
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        text_output, lse = attention(query, key, value, mask, scale)
        # 2. The branch: one score per depth, and the log-sum-exp over text and branch.
        grouped = _grouped(query, key)
        branch_keys, branch_values = branch[:num_depths], branch[num_depths:]
        scores = torch.stack([_dot(grouped, keys[:, :, None]) for keys in branch_keys]).flatten(2, 3) * scale
        total = torch.cat([lse[None], scores.to(lse.dtype)]).logsumexp(0)  # [batch, head, branch]
        # 3. The weighted sum of both outputs.
        output = _grouped(text_output * (lse - total).exp()[..., None].to(query.dtype), key)
        for weight, values in zip((scores - total).exp().to(query.dtype), branch_values, strict=True):
            output = torch.addcmul(output, _grouped(weight[..., None], key), values[:, :, None])
        output = output.flatten(1, 2)
        ctx.save_for_backward(query, key, value, mask, output, total, *branch)
        ctx.scale, ctx.num_depths = scale, num_depths
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # 1. The text's part, by the kernel's backward pass with the joint log-sum-exp.
        query, key, value, mask, output, total, *branch = ctx.saved_tensors
        grad = grads[0].contiguous()
        query_grad, key_grad, value_grad = attention_gradient(grad, query, key, value, mask, output, total, ctx.scale)
        # 2. The branch's part, depth by depth, by the gradient of softmax.
        delta = _grouped(_dot(grad, output), key)  # [batch, kv_head, group, branch]
        grouped, grouped_grad, grouped_total = _grouped(query, key), _grouped(grad, key), _grouped(total, key)
        query_grad = _grouped(query_grad, key)
        branch_key_grads, branch_value_grads = [], []
        for keys, values in zip(branch[: ctx.num_depths], branch[ctx.num_depths :], strict=True):
            keys, values = keys[:, :, None], values[:, :, None]
            scores = _dot(grouped, keys) * ctx.scale
            probs = (scores - grouped_total).exp().to(query.dtype)
            score_grads = (probs * (_dot(grouped_grad, values) - delta) * ctx.scale).to(query.dtype)[..., None]
            query_grad = torch.addcmul(query_grad, score_grads, keys)
            branch_key_grads.append((score_grads * grouped).sum(2))
            branch_value_grads.append((probs[..., None] * grouped_grad).sum(2))
        return query_grad.flatten(1, 2), key_grad, value_grad, None, None, None, *branch_key_grads, *branch_value_grads


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the inner products of the last dimension, at least in float32: scores are exponents."""
    return (left * right).sum(-1, dtype=torch.promote_types(left.dtype, torch.float32))


def _grouped(values: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Put the heads that share a key next to each other: [batch, kv_head, group, ...]."""
    return values.unflatten(1, (key.shape[1], -1))
