"""From logits to the distribution that is sampled from, and the only things that are ever left to chance."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
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
    """Decides in a generator's place what is left to chance: a certificate plays every outcome, `RowSeeds` each row apart."""

    def draw(self, probs: torch.Tensor) -> torch.Tensor: ...
    def flip(self, probs: torch.Tensor) -> torch.Tensor: ...


Randomness = torch.Generator | Chance | None


def draw(probs: Float[torch.Tensor, "*batch vocab"], generator: Randomness = None) -> Int[torch.Tensor, "*batch"]:
    """One token of each distribution; needs no normalisation and no read by the host.

    Of independent exponential clocks with rates p, the first to ring is token i with probability p(i) / sum(p).
    """
    if isinstance(generator, Chance):
        return generator.draw(probs)
    return _first_to_ring(probs, _clocks(probs, generator))


def draw_several(
    probs: Float[torch.Tensor, "*batch vocab"], count: int, generator: Randomness = None
) -> Int[torch.Tensor, "*batch count"]:
    """`count` different tokens of each distribution, drawn one after the other without replacement, in that order.

    The clocks of `draw`: who rings second is drawn from what the first has left. Needs as many tokens of positive probability.
    """
    if isinstance(generator, Chance):
        drawn = []
        for _ in range(count):
            drawn.append(generator.draw(probs))
            probs = probs.scatter(-1, drawn[-1][..., None], 0.0)
        return torch.stack(drawn, dim=-1)
    return (probs / _clocks(probs, generator)).topk(count, dim=-1).indices


def flip(probs: Float[torch.Tensor, "*batch"], generator: Randomness = None) -> Bool[torch.Tensor, "*batch"]:
    """One coin for each probability."""
    if isinstance(generator, Chance):
        return generator.flip(probs)
    return torch.rand(probs.shape, dtype=probs.dtype, device=probs.device, generator=generator) < probs


class RowSeeds:
    """A seed for each row of a batch: what a row draws depends on its seed and on how many decisions came before, and on
    nothing else. So its text is the same alone, among any neighbours, and in any place among them.

    For each decision of each row a generator is seeded anew. On a CPU the values that it gives first do not depend on how many
    are asked for, so a row draws the same for its own nodes whatever the padding behind them; elsewhere drafters' trees are of
    one size in all batches. Good for one call of `generate`: a second one goes on where the first ended.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = tuple(seeds)
        self._num_decisions = 0

    def draw(self, probs: Float[torch.Tensor, "batch *entry vocab"]) -> Int[torch.Tensor, "batch *entry"]:
        return _first_to_ring(probs, self._fill(probs, torch.Tensor.exponential_))

    def flip(self, probs: Float[torch.Tensor, "batch *entry"]) -> Bool[torch.Tensor, "batch *entry"]:
        return self._fill(probs, torch.Tensor.uniform_) < probs

    def select(self, rows: Sequence[int]) -> "RowSeeds":
        """The seeds of these rows of the batch only."""
        selected = RowSeeds([self.seeds[row] for row in rows])
        selected._num_decisions = self._num_decisions
        return selected

    def _fill(self, like: torch.Tensor, fill: Callable[..., torch.Tensor]) -> torch.Tensor:
        if len(like) != len(self.seeds):
            raise ValueError(f"there are {len(self.seeds)} seeds for {len(like)} rows; give one per row")
        generator = torch.Generator(like.device)
        values = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        for row, seed in zip(values, self.seeds, strict=True):
            # A string is hashed: neighbouring seeds and decisions get unrelated streams.
            fill(row, generator=generator.manual_seed(Random(f"{seed}/{self._num_decisions}").getrandbits(63)))
        self._num_decisions += 1
        return values


def _first_to_ring(
    probs: Float[torch.Tensor, "*batch vocab"], clocks: Float[torch.Tensor, "*batch vocab"]
) -> Int[torch.Tensor, "*batch"]:
    return (probs / clocks).argmax(-1)


def _clocks(
    probs: Float[torch.Tensor, "*batch vocab"], generator: torch.Generator | None
) -> Float[torch.Tensor, "*batch vocab"]:
    return torch.empty_like(probs).exponential_(generator=generator)
