"""CUDA's memory-efficient attention, imitated on a CPU.

Inside `on_cpu`, the attention of branches takes CUDA's code path. The kernel's checks of shapes,
widths and alignments are imitated too: they are those of `attention.cu`, `kernel_forward.h` and
`kernel_backward.h` in PyTorch.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import pad

from outrider.models.llm import split_attention

WORD = 8
"""Strides of 16-bit types are multiples of so many elements."""
LSE_ALIGNMENT = 32


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let the attention of branches call the imitated kernels, inside the block."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
    try:
        with patch.object(split_attention, "on_cuda", lambda tensor: True):
            yield
    finally:
        library._destroy()


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the output, the padded log-sum-exp, and a seed and offset that nothing uses."""
    require_supported(query, key, value, bias)
    assert compute_log_sumexp, "the log-sum-exp wasn't asked for"
    scores = scores_of(query, key, bias, scale)
    lse = scores.logsumexp(-1)
    output = ((scores - lse[..., None]).exp() @ value.to(scores.dtype)).to(query.dtype)
    # The kernel's output lies in memory as [batch, query, head, head_dim].
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    lse = pad(lse.float(), (0, -lse.shape[2] % LSE_ALIGNMENT), value=torch.inf)
    return output, lse, torch.empty((), dtype=torch.long), torch.empty((), dtype=torch.long)


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    dropout_p: float,
    mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of query, key and value, from output and log-sum-exp as they are given."""
    require_supported(query, key, value, bias)
    assert lse.dtype == torch.float32
    assert lse.stride(1) % WORD == 0, "LSE is not correctly aligned"
    assert grad.shape == output.shape == (*query.shape[:3], value.shape[3])
    scores = scores_of(query, key, bias, scale)
    probs = (scores - lse[..., : query.shape[2], None].to(scores.dtype)).exp()
    wide_grad = grad.to(scores.dtype)
    delta = (wide_grad * output.to(scores.dtype)).sum(-1, keepdim=True)
    score_grads = probs * (wide_grad @ value.to(scores.dtype).transpose(2, 3) - delta) * (scale or 1.0)
    grads = (
        score_grads @ key.to(scores.dtype),
        score_grads.transpose(2, 3) @ query.to(scores.dtype),
        probs.transpose(2, 3) @ wide_grad,
    )
    return *(part.to(query.dtype) for part in grads), None


def scores_of(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor, scale: float | None) -> torch.Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.to(wide) @ key.to(wide).transpose(2, 3) * (scale or 1.0) + bias.to(wide)


def require_supported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> None:
    """Raise AssertionError for arguments that the kernel doesn't take."""
    assert query.dtype == key.dtype == value.dtype == bias.dtype, "another dtype than query's"
    assert query.shape[1] == key.shape[1] == value.shape[1], "the kernel supports no grouped heads"
    assert bias.shape == (*query.shape[:3], key.shape[2]), f"attn_bias: wrong shape {tuple(bias.shape)}"
    assert bias.stride(3) == 1 or bias.shape[3] == 1, "attn_bias: last dimension must be contiguous"
    for name, tensor in {"query": query, "key": key, "value": value, "attn_bias": bias}.items():
        strides: Any = [stride for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True) if size > 1]
        assert all(stride % WORD == 0 for stride in strides), f"{name} is not correctly aligned: strides {tensor.stride()}"
        assert tensor.data_ptr() % 16 == 0, f"{name} is not correctly aligned: it begins within 16 bytes"
