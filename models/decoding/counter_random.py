"""Random numbers that are functions of a key and an index, equal on every device.

A generator's numbers depend on how many were drawn before, and differ between CPUs and GPUs. Here
number i of a stream is a hash of (key + i * GOLDEN): SplitMix64 (Steele et al. 2014,
doi:10.1145/2660193.2660195) with the finalizer of MurmurHash3. Only integer operations decide, so
the numbers are the same on every device, and a CUDA graph can record them.
"""

import torch
from jaxtyping import Float, Int

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""The step of SplitMix64, as a signed number: 2**64 divided by the golden ratio."""
FACTORS = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)
SHIFT, FLOAT_BITS = 33, 52


def stream_keys(*parts: Int[torch.Tensor, "*#stream"]) -> Int[torch.Tensor, "*stream"]:
    """Return the key of each stream, a hash of its parts, such as a seed and a position."""
    key = torch.zeros((), dtype=torch.long, device=parts[0].device)
    for part in parts:
        key = _mixed((key ^ part) + GOLDEN)
    return key


def uniform(keys: Int[torch.Tensor, "*stream"], count: int) -> Float[torch.Tensor, "*stream count"]:
    """Return the first `count` numbers of each stream, in float64, above 0 and below 1."""
    bits = _mixed(keys[..., None] + torch.arange(1, count + 1, device=keys.device) * GOLDEN)
    # The upper bits, as a fraction: in the middle of each of 2**52 intervals, so never 0 or 1.
    bits = bits.bitwise_right_shift_(64 - FLOAT_BITS).bitwise_and_(2**FLOAT_BITS - 1)
    return bits.double().add_(0.5).mul_(2.0**-FLOAT_BITS)


def exponential(keys: Int[torch.Tensor, "*stream"], count: int) -> Float[torch.Tensor, "*stream count"]:
    """Return `count` exponential times of rate 1 for each stream, in float64, above 0."""
    return uniform(keys, count).log_().neg_()


def _mixed(bits: Int[torch.Tensor, "*_"]) -> Int[torch.Tensor, "*_"]:
    """Mix the bits of each number, in place."""
    for factor in FACTORS:
        bits.bitwise_xor_(_upper(bits)).mul_(factor)
    return bits.bitwise_xor_(_upper(bits))


def _upper(bits: Int[torch.Tensor, "*_"]) -> Int[torch.Tensor, "*_"]:
    # The shift of a negative number fills up with ones, which the mask removes.
    return bits.bitwise_right_shift(SHIFT).bitwise_and_(2 ** (64 - SHIFT) - 1)
