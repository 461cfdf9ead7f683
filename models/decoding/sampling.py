"""Sampling: from logits to probabilities, and every random decision of the decode loop.

Random numbers are functions of a key and an index. A generator's numbers depend on how many were
drawn before, and differ between CPUs and GPUs. Here number i of a stream is a hash of
(key + i * GOLDEN): SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195) with the finalizer
of MurmurHash3. Only integer operations decide, so the numbers are the same on every device, and a
CUDA graph can record them.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from math import log
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int

from ...data.device import to_device

MIN_PRECISION = torch.float32
MAX_SEED = 2**63 - 1
"""Larger seeds of rows are cut to their lower 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of sampling, in the order in which they act (as in transformers)."""

    temperature: float = 1.0
    """0 is greedy: all probability on the arg-max."""
    top_k: int | None = None
    """Keep only the k most probable tokens; None keeps all."""
    top_p: float | None = None
    """Keep the smallest set of most probable tokens with a sum of at least top_p; None keeps
    all."""

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
    """Return the distribution that `sampling` makes of logits.

    Probabilities are in float32, or in float64 if the logits are. Ties at the edge of top-k are broken by torch's
    topk, and ties at the edge of top-p in favour of the first token.
    """
    logits = logits.to(torch.promote_types(logits.dtype, MIN_PRECISION))
    if sampling.temperature < torch.finfo(logits.dtype).tiny:  # would be rounded to 0
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Subtract the maximum first: a tiny temperature then gives -inf, and not inf - inf.
    probs = ((logits - logits.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        top = probs.topk(sampling.top_k, dim=-1)
        probs = torch.zeros_like(probs).scatter_(-1, top.indices, top.values)
        probs = probs / probs.sum(-1, keepdim=True)
    if sampling.top_p is not None and sampling.top_p < 1:
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked  # the sum over all more probable tokens
        ranked = ranked.masked_fill(before >= sampling.top_p, 0.0)
        # The most probable token always stays.
        ranked[..., 0] = ranked[..., 0].clamp(min=torch.finfo(ranked.dtype).tiny)
        probs = torch.zeros_like(probs).scatter_(-1, order, ranked)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


@runtime_checkable
class Chance(Protocol):
    """Source of the target's random choices: `RowSeeds`. Tests also enumerate every outcome."""

    def choose(
        self, probs: Float[torch.Tensor, "batch entry vocab"], depths: Int[torch.Tensor, "batch entry"], max_depth: int
    ) -> Int[torch.Tensor, "batch entry"]:
        """Choose one token after each entry of a tree, at its depth, of which one path will be used.

        `depths` counts tokens after entry 0. The distributions need not be normalised, and the host doesn't wait.
        """


Randomness = Chance | None
"""None where nothing is random."""


def choose(
    probs: Float[torch.Tensor, "batch entry vocab"],
    depths: Int[torch.Tensor, "batch entry"],
    max_depth: int,
    generator: Randomness,
) -> Int[torch.Tensor, "batch entry"]:
    """Choose by `generator`. Raises ValueError if it is none."""
    if not isinstance(generator, Chance):
        raise ValueError(
            f"a rule that samples was called with generator={generator!r}; give RowSeeds([...]), or "
            "RowSeeds.drawn(rows, generator)"
        )
    return generator.choose(probs, depths, max_depth)


class RowSeeds:
    """A seed for each row of a batch: a row's text doesn't depend on its batch.

    A row decodes the same text alone, with any neighbours, and at any index of the batch. The text
    is also the same with every drafter: the draw of token t of an answer depends on the row's seed
    and on t alone. So plain decoding and tree decoding with
    the same seeds emit the same text. (The idea is common random numbers; for drafters, "drafter
    invariance", arXiv 2408.07978.) Sampling stays exact: with or without a tree, the draw of token
    t is independent of the text before it.

    A token is drawn with exponential clocks: of independent ones with rates p, the first to ring is token i with
    probability p(i) / sum(p). Entries of one depth share their clocks. All numbers are the same on every device (see
    `stream_keys`).

    With `sampling`, the way in which the target's tokens are drawn, drafters may look at the clocks of coming
    tokens (see `foreseen`).
    """

    def __init__(self, seeds: Sequence[int], positions: Sequence[int] | None = None, sampling: Sampling | None = None) -> None:
        self.seeds, self.sampling = tuple(int(seed) & MAX_SEED for seed in seeds), sampling
        self._positions = (0,) * len(self.seeds) if positions is None else tuple(map(int, positions))
        if len(self._positions) != len(self.seeds):
            raise ValueError(f"there are {len(self._positions)} positions for {len(self.seeds)} seeds; give one per seed")
        self._rows: torch.Tensor | None = None

    @classmethod
    def drawn(cls, num_rows: int, generator: torch.Generator | None = None) -> "RowSeeds":
        """Return seeds that a generator draws, by default torch's global one of the CPU."""
        device = torch.device("cpu") if generator is None else generator.device
        return cls(torch.randint(MAX_SEED, (num_rows,), generator=generator, device=device).tolist())

    @classmethod
    def of_rows(cls, rows: Int[torch.Tensor, "2 batch"]) -> "RowSeeds":
        """Return an instance with the seeds and positions of `rows`, which needs no copy from the host."""
        result = cls([])
        result._rows = rows
        return result

    def rows(self, device: torch.device) -> Int[torch.Tensor, "2 batch"]:
        """Return the seed of each row, and the number of tokens of its answer so far."""
        if self._rows is None:
            self._rows = to_device(np.array([self.seeds, self._positions], np.int64), device)
        return self._rows

    def choose(
        self, probs: Float[torch.Tensor, "batch entry vocab"], depths: Int[torch.Tensor, "batch entry"], max_depth: int
    ) -> Int[torch.Tensor, "batch entry"]:
        if depths.shape[1] <= max_depth:  # fewer entries than depths
            return (probs / self.clocks(probs, depths, probs.shape[-1])).max(-1).indices
        clocks = self.clocks(probs, torch.arange(max_depth + 1, device=probs.device), probs.shape[-1])
        return (probs / clocks.gather(1, depths[:, :, None].expand_as(probs))).max(-1).indices

    def draw(self, row: int, depth: int, probs: Float[torch.Tensor, " vocab"]) -> int:
        """Choose one token of a row on the host, at a depth; it is the token that `choose` chooses there."""
        # A clock -log(u) is at least 1 - u, so it rings at 1 - u at the earliest. Only tokens that can still be the first by
        # this bound get a logarithm.
        key, rates = _key_on_host(self.seeds[row], self._positions[row] + depth), probs.numpy()
        numbers = _numbers_on_host(key, len(rates))
        bounds = rates / ((numbers ^ np.uint64(2**FLOAT_BITS - 1)).astype(rates.dtype) + rates.dtype.type(0.5))
        first = bounds.argmax()
        reached = rates[first] / _clock_on_host(int(numbers[first])) * 2.0**-FLOAT_BITS / ROUNDING
        early = np.flatnonzero(~(bounds < reached))  # all, if there are NaNs
        clocks = -np.log((numbers[early] + 0.5) * 2.0**-FLOAT_BITS)
        return int(early[(rates[early] / clocks.astype(rates.dtype)).argmax()])

    def clocks(
        self,
        probs: Float[torch.Tensor, "batch *_"],
        depths: Int[torch.Tensor, "*_ depth"],
        tokens: int | Int[torch.Tensor, " token"],
    ) -> Float[torch.Tensor, "batch depth token"]:
        """Return the clocks by which `choose` picks the tokens after entries at some depths (of all rows, or of each).

        They are those of all or of some tokens, on the device and in the type of `probs`.
        """
        self.require(len(probs))
        seeds, positions = self.rows(probs.device)[..., None]
        return exponential(stream_keys(seeds, positions + depths), tokens).to(probs.dtype)

    def rings(self, row: int, depths: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return one clock for each depth and its token, of a row: on the host, where a few need no tensors."""
        keys = {depth: _key_on_host(self.seeds[row], self._positions[row] + depth) for depth in set(depths)}
        bits = [_mixed_on_host(keys[depth] + (token + 1) * GOLDEN) for depth, token in zip(depths, tokens, strict=True)]
        return [_clock_on_host(number >> 64 - FLOAT_BITS) for number in bits]

    def after(self, num_emitted: Sequence[int], rows: Sequence[int]) -> "RowSeeds":
        """Return the seeds of these rows after their answers have grown by `num_emitted` tokens."""
        positions = [self._positions[row] + num_emitted[row] for row in rows]
        return RowSeeds([self.seeds[row] for row in rows], positions, self.sampling)

    def shown(self, sampling: Sampling) -> "RowSeeds":
        """Return the same seeds for tokens that are drawn so, which drafters may foresee."""
        other = copy(self)
        other.sampling = sampling
        return other

    def require(self, num_rows: int) -> None:
        """Raise ValueError if there isn't one seed for each row."""
        num_seeds = len(self.seeds) if self._rows is None else self._rows.shape[1]
        if num_seeds != num_rows:
            raise ValueError(f"there are {num_seeds} seeds for {num_rows} rows; give one per row")


SHARPNESS = 0.75
"""How sure a drafter is of the token that its own probabilities and the clocks choose: the scale of its scores at
temperature 1, measured with SmolLM2's ReDrafter by likelihood. It goes to 1 as the clocks matter less."""
NUCLEUS = 64
"""Most tokens that `top_k` and `top_p` keep, as a drafter counts them."""
OUTSIDE = 30.0
"""Logits are lowered by this where `top_k` or `top_p` drops the token: it comes last, but in order, and stays finite."""


def foreseen(
    logits: Float[torch.Tensor, "batch node output"],
    depths: range | Int[torch.Tensor, "batch node"],
    generator: Randomness,
    to_tokens: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Float[torch.Tensor, "batch node output"]:
    """Return a drafter's logits for the tokens that the target will draw, where its clocks are known.

    The target draws the arg-max of log p - log clock (see `RowSeeds`), and the clocks are known before p is. So the
    arg-max of log q - log clock is the better draft: it is the same token wherever q is near p (arXiv 2408.07978,
    section 3). What is drawn doesn't depend on it. Times the temperature these are logits again.

    `depths` are those of the entries that the nodes follow, one for all nodes or one for each (of all rows, or of
    each). `to_tokens` returns the
    target's tokens of outputs, where these differ. Without known clocks the logits stay as they are.
    """
    if not isinstance(generator, RowSeeds) or generator.sampling is None:
        return logits
    sampling, logits = generator.sampling, logits.to(torch.promote_types(logits.dtype, MIN_PRECISION))
    temperature, size = sampling.temperature, logits.shape[-1]
    if sampling.top_k is not None or sampling.top_p is not None:
        logits = torch.where(logits < _least_kept(logits, sampling), logits - OUTSIDE, logits)
    tokens = to_tokens(torch.arange(size, device=logits.device)) if to_tokens else size
    places = torch.arange(depths.start, depths.stop, device=logits.device) if isinstance(depths, range) else depths
    clocks = generator.clocks(logits, places, tokens)
    return sharpness(generator) * (logits - temperature * clocks.log())


def sharpness(generator: Randomness) -> float:
    """Return the scale of the scores of `foreseen`; 1 where it changes nothing."""
    sampling = generator.sampling if isinstance(generator, RowSeeds) else None
    return 1.0 if sampling is None else float(SHARPNESS ** min(1.0, sampling.temperature))


def _least_kept(logits: Float[torch.Tensor, "*batch output"], sampling: Sampling) -> Float[torch.Tensor, "*batch 1"]:
    """Return the least logit that `sampling` keeps, of the likeliest tokens; a whole sort would take longer than a draft."""
    top = logits.topk(min(sampling.top_k or NUCLEUS, NUCLEUS, logits.shape[-1]), dim=-1).values
    if sampling.top_p is None:
        return top[..., -1:]
    best = top[..., :1]
    of = logits if sampling.top_k is None else top
    total = ((of - best) / sampling.temperature).exp().sum(-1, keepdim=True)
    probs = ((top - best) / sampling.temperature).exp() / total
    is_kept = probs.cumsum(-1) - probs < sampling.top_p
    return top.masked_fill(~is_kept, torch.inf).amin(-1, keepdim=True)


# --- random numbers that are functions of a key and an index, equal on every device


GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""The step of SplitMix64, as a signed number: 2**64 divided by the golden ratio."""
FACTORS = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)
SHIFT, FLOAT_BITS, UNSIGNED = 33, 52, 2**64 - 1
ROUNDING = 1.01
"""More than the rounding of bounds in float32, for probabilities whose sum is about 1."""


def stream_keys(*parts: Int[torch.Tensor, "*#stream"]) -> Int[torch.Tensor, "*stream"]:
    """Return the key of each stream, a hash of its parts, such as a seed and a position."""
    key = torch.zeros((), dtype=torch.long, device=parts[0].device)
    for part in parts:
        key = _mixed((key ^ part) + GOLDEN)
    return key


def uniform(
    keys: Int[torch.Tensor, "*stream"], count: int | Int[torch.Tensor, "*#stream number"]
) -> Float[torch.Tensor, "*stream number"]:
    """Return the first `count` numbers of each stream, or those with these indexes, in float64, above 0 and below 1."""
    indexes = torch.arange(count, device=keys.device) if isinstance(count, int) else count
    bits = _mixed(keys[..., None] + (indexes + 1) * GOLDEN)
    # The upper bits, as a fraction: in the middle of each of 2**52 intervals, so never 0 or 1.
    bits = bits.bitwise_right_shift_(64 - FLOAT_BITS).bitwise_and_(2**FLOAT_BITS - 1)
    return bits.double().add_(0.5).mul_(2.0**-FLOAT_BITS)


def exponential(
    keys: Int[torch.Tensor, "*stream"], count: int | Int[torch.Tensor, "*#stream number"]
) -> Float[torch.Tensor, "*stream number"]:
    """Return exponential times of rate 1 for each stream, in float64, above 0: see `uniform`."""
    return uniform(keys, count).log_().neg_()


def _mixed(bits: Int[torch.Tensor, "*_"]) -> Int[torch.Tensor, "*_"]:
    """Mix the bits of each number, in place."""
    for factor in FACTORS:
        bits.bitwise_xor_(_upper(bits)).mul_(factor)
    return bits.bitwise_xor_(_upper(bits))


def _key_on_host(*parts: int) -> int:
    key = 0
    for part in parts:
        key = _mixed_on_host((key ^ part) + GOLDEN)
    return key


def _mixed_on_host(bits: int) -> int:
    bits &= UNSIGNED
    for factor in FACTORS:
        bits = (bits ^ bits >> SHIFT) * factor & UNSIGNED
    return bits ^ bits >> SHIFT


def _numbers_on_host(key: int, count: int) -> Any:
    """Return the first `count` numbers of a stream as integers below 2**FLOAT_BITS: NumPy takes half of torch's time."""
    bits = np.arange(1, count + 1, dtype=np.uint64)
    bits *= np.uint64(GOLDEN & UNSIGNED)
    bits += np.uint64(key & UNSIGNED)
    upper = bits >> np.uint64(SHIFT)
    for factor in FACTORS:
        bits ^= upper
        bits *= np.uint64(factor & UNSIGNED)
        np.right_shift(bits, np.uint64(SHIFT), out=upper)
    bits ^= upper
    bits >>= np.uint64(64 - FLOAT_BITS)
    return bits


def _clock_on_host(number: int) -> float:
    return -log((number + 0.5) * 2.0**-FLOAT_BITS)


def _upper(bits: Int[torch.Tensor, "*_"]) -> Int[torch.Tensor, "*_"]:
    # The shift of a negative number fills up with ones, which the mask removes.
    return bits.bitwise_right_shift(SHIFT).bitwise_and_(2 ** (64 - SHIFT) - 1)
