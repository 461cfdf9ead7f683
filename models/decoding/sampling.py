"""From logits to the distribution that is sampled from, and the only things that are ever left to chance."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int

MIN_PRECISION = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of sampling, in the order in which they act (transformers' own): temperature, top-k, top-p."""

    temperature: float = 1.0
    """0 is greedy: all probability on the arg-max."""
    top_k: int | None = None
    """Keep the k likeliest tokens."""
    top_p: float | None = None
    """Keep the fewest likeliest tokens whose probabilities sum to at least top_p."""

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k is {self.top_k}; it must be at least 1, or null for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}; it must be above 0 and at most 1, or null for all tokens")
        if problems:
            raise ValueError("sampling: " + "; ".join(problems))


def warp(logits: Float[torch.Tensor, "*batch vocab"], sampling: Sampling) -> Float[torch.Tensor, "*batch vocab"]:
    """The distribution that `sampling` makes of logits: the only place where its parameters act, for targets and drafters.

    Probabilities are in float32, or in float64 where the logits are. Of equally likely tokens at the edge of top-k
    torch's topk chooses, at that of top-p the first.
    """
    logits = logits.to(torch.promote_types(logits.dtype, MIN_PRECISION))
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Below 0 first, so that a tiny temperature makes -inf of the others, and not inf - inf.
    probs = ((logits - logits.max(-1, keepdim=True).values) / sampling.temperature).softmax(-1)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        top = probs.topk(sampling.top_k, dim=-1)
        probs = torch.zeros_like(probs).scatter_(-1, top.indices, top.values)
        probs = probs / probs.sum(-1, keepdim=True)
    if sampling.top_p is not None and sampling.top_p < 1:
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked  # the sum of all likelier tokens
        ranked = ranked.masked_fill(before >= sampling.top_p, 0.0)
        ranked[..., 0] = ranked[..., 0].clamp(min=torch.finfo(ranked.dtype).tiny)  # the likeliest always stays
        probs = torch.zeros_like(probs).scatter_(-1, order, ranked)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


@runtime_checkable
class Chance(Protocol):
    """Decides in a generator's place what is left to chance, so that a certificate can play every outcome."""

    def draw(self, probs: torch.Tensor) -> torch.Tensor: ...
    def flip(self, probs: torch.Tensor) -> torch.Tensor: ...


Randomness = torch.Generator | Chance | None


def draw(probs: Float[torch.Tensor, "*batch vocab"], generator: Randomness = None) -> Int[torch.Tensor, "*batch"]:
    """One token of each distribution; needs no normalisation and no read by the host.

    Of independent exponential clocks with rates p, the first to ring is token i with probability p(i) / sum(p).
    """
    if isinstance(generator, Chance):
        return generator.draw(probs)
    return (probs / _clocks(probs, generator)).argmax(-1)


def draw_several(
    probs: Float[torch.Tensor, "*batch vocab"], count: int, generator: torch.Generator | None = None
) -> Int[torch.Tensor, "*batch count"]:
    """`count` different tokens of each distribution, drawn one after the other without replacement, in that order.

    The clocks of `draw`: who rings second is drawn from what the first has left. Needs as many tokens of positive probability.
    """
    return (probs / _clocks(probs, generator)).topk(count, dim=-1).indices


def flip(probs: Float[torch.Tensor, "*batch"], generator: Randomness = None) -> Bool[torch.Tensor, "*batch"]:
    """One coin for each probability."""
    if isinstance(generator, Chance):
        return generator.flip(probs)
    return torch.rand(probs.shape, dtype=probs.dtype, device=probs.device, generator=generator) < probs


def _clocks(
    probs: Float[torch.Tensor, "*batch vocab"], generator: torch.Generator | None
) -> Float[torch.Tensor, "*batch vocab"]:
    return torch.empty_like(probs).exponential_(generator=generator)
