"""Hidden states as they lie on disk: bfloat16, or eight bits with a scale for each token.

    type            values                          scale                          worst error of an element
    bfloat16        8 bits of precision             none                           2^-8 of itself
    float8_e4m3fn   4 bits, where not subnormal     largest of the token / 448     2^-4 of itself, or 2^-10 of the scale
    int8            even steps                      largest of the token / 127     half a scale

So eight bits of floating point keep the small elements beside a huge one, which even steps lose, and even steps are finer where
all elements are of one size.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""The largest value of the types that have scales: that of OCP's 8-bit format E4M3, and int8's that has an opposite."""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStates:
    """A vector for each token: `values`, times the token's `scales` where there are any."""

    values: Shaped[torch.Tensor, "token width"]
    scales: Float[torch.Tensor, " token"] | None = None

    def __post_init__(self) -> None:
        assert self.scales is None or self.scales.shape == self.values.shape[:1], "each token has a scale"

    def __len__(self) -> int:
        return len(self.values)

    def tokens(self, start: int, stop: int) -> "StoredStates":
        """Those of a part of the tokens, in the same memory."""
        return StoredStates(values=self.values[start:stop], scales=None if self.scales is None else self.scales[start:stop])

    def decode(self) -> Float[torch.Tensor, "token width"]:
        """The states: in float32 where they have scales, else as they are."""
        return self.values if self.scales is None else self.values.float() * self.scales[:, None]


def encode_states(states: Float[torch.Tensor, "token width"], dtype: str) -> StoredStates:
    """The states in one of STATE_DTYPES, on the CPU; the scale is symmetric, from the token's largest element.

    Raises ValueError where a state isn't finite.
    """
    if not states.isfinite().all():
        raise ValueError(
            "the target's hidden states are not all numbers: its weights are damaged, or overflow their type; load it with "
            "target.dtype=bfloat16 or float32, or leave the text out"
        )
    if dtype not in LARGEST:
        return StoredStates(values=states.to("cpu", getattr(torch, dtype)))
    states = states.float()
    # A token of zeros has a scale too, so that nothing is divided by zero.
    scales = (states.abs().amax(1) / LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = states / scales[:, None]
    values = scaled.round() if dtype == "int8" else scaled
    return StoredStates(values=values.to(getattr(torch, dtype)).cpu(), scales=scales.cpu())


def state_bytes(width: int, dtype: str) -> int:
    """What a token's vector of `width` elements takes on disk."""
    return width * getattr(torch, dtype).itemsize + (SCALE_BYTES if dtype in LARGEST else 0)
