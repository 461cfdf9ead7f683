"""Hidden states on disk: bfloat16, or 8 bits with a scale for each token.

    type            values                     scale                        largest error
    bfloat16        8 bits of precision        none                         2^-8 of the element
    float8_e4m3fn   4 bits, unless subnormal   largest of the token / 448   2^-4 of the element,
                                                                            or 2^-10 of the scale
    int8            even steps                 largest of the token / 127   half a scale

8-bit floating point keeps small elements next to a huge one, which even steps lose. Even steps are
more precise if all elements have about the same size.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""Largest value of the types with scales: OCP's 8-bit format E4M3, and int8 without -128."""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStates:
    """A vector for each token: `values`, times the token's `scales` if there are any."""

    values: Shaped[torch.Tensor, "token width"]
    scales: Float[torch.Tensor, " token"] | None = None

    def __post_init__(self) -> None:
        assert self.scales is None or self.scales.shape == self.values.shape[:1], "each token has a scale"

    def __len__(self) -> int:
        return len(self.values)

    def tokens(self, start: int, stop: int) -> "StoredStates":
        """Return the states of a range of tokens, in the same memory."""
        return StoredStates(values=self.values[start:stop], scales=None if self.scales is None else self.scales[start:stop])

    def decode(self) -> Float[torch.Tensor, "token width"]:
        """Return the states: in float32 if they have scales, else in the stored type."""
        return self.values if self.scales is None else self.values.float() * self.scales[:, None]


def encode_states(states: Float[torch.Tensor, "token width"], dtype: str) -> StoredStates:
    """Encode states in one of STATE_DTYPES, on the CPU, scaled by each token's largest element.

    Raises ValueError for a state that isn't finite.
    """
    if not states.isfinite().all():
        raise ValueError(
            "the target's hidden states are not all numbers: its weights are damaged, or overflow their type; load it with "
            "target.dtype=bfloat16 or float32, or leave the text out"
        )
    if dtype not in LARGEST:
        return StoredStates(values=states.to("cpu", getattr(torch, dtype)))
    states = states.float()
    # A token of zeros gets a positive scale too, to avoid a division by zero.
    scales = (states.abs().amax(1) / LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = states / scales[:, None]
    values = scaled.round() if dtype == "int8" else scaled
    return StoredStates(values=values.to(getattr(torch, dtype)).cpu(), scales=scales.cpu())


def state_bytes(width: int, dtype: str) -> int:
    """Return the bytes on disk of a token's vector of `width` elements."""
    return width * getattr(torch, dtype).itemsize + (SCALE_BYTES if dtype in LARGEST else 0)
