"""Hidden states on disk: bfloat16, or 8 bits with a scale for each token.

    type            values                     scale                        largest error
    bfloat16        8 bits of precision        none                         2^-8 of the element
    float8_e4m3fn   4 bits, unless subnormal   largest of the token / 448   2^-4 of the element,
                                                                            or 2^-10 of the scale
    int8            even steps                 largest of the token / 127   half a scale

8-bit floating point keeps small elements next to a huge one, which even steps lose. Even steps are
more precise if all elements have about the same size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped

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

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "StoredStates":
        """Return the states with `move` applied to the tensors, which copies them elsewhere."""
        return StoredStates(values=move(self.values), scales=None if self.scales is None else move(self.scales))

    def decode(self) -> Float[torch.Tensor, "token width"]:
        """Return the states: in float32 if they have scales, else in the stored type."""
        return self.values if self.scales is None else self.values.float() * self.scales[:, None]


def joined(parts: Sequence[StoredStates]) -> StoredStates:
    """Return the states of all parts, one after another.

    Parts of different types are decoded: a shard of another program may have float32.
    """
    if len({part.values.dtype for part in parts}) > 1:
        return StoredStates(values=torch.cat([part.decode() for part in parts]))
    scales = [part.scales for part in parts if part.scales is not None]
    return StoredStates(values=torch.cat([part.values for part in parts]), scales=torch.cat(scales) if scales else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStates:
    """Stored states of a batch of texts, one text after another and without padding.

    They are moved to the device in the stored type, and decoded and padded there. `index` is each
    token's place among all batch x seq tokens. `layers` are the inputs of layers, side by side in
    the decoded features.
    """

    index: Int[torch.Tensor, " token"]
    hidden_states: StoredStates | None = None
    layers: tuple[StoredStates, ...] = ()

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "BatchStates":
        """Return the states with `move` applied to every tensor."""
        return BatchStates(
            index=move(self.index),
            hidden_states=None if self.hidden_states is None else self.hidden_states.moved(move),
            layers=tuple(layer.moved(move) for layer in self.layers),
        )

    def padded(self, states: Sequence[StoredStates], shape: tuple[int, ...]) -> Float[torch.Tensor, "batch seq width"] | None:
        """Decode states, and put them side by side at their places; zeros elsewhere.

        `shape` is [batch, seq]. Returns None without states.
        """
        if not states:
            return None
        decoded = [part.decode() for part in states]
        values = decoded[0] if len(decoded) == 1 else torch.cat(decoded, dim=1)
        places = values.new_zeros(math.prod(shape), values.shape[1])
        return places.index_copy_(0, self.index, values).view(*shape, -1)


def are_finite(states: Float[torch.Tensor, "token width"]) -> Bool[torch.Tensor, " token"]:
    """Return which tokens' states are all numbers, on the states' device."""
    return states.isfinite().all(dim=1)


def encode_states(states: Float[torch.Tensor, "token width"], dtype: str) -> StoredStates:
    """Encode finite states in one of STATE_DTYPES, scaled by each token's largest element.

    The result is on the states' device. Where a state isn't finite it is meaningless: see
    `are_finite`.
    """
    if dtype not in LARGEST:
        return StoredStates(values=states.to(getattr(torch, dtype)))
    states = states.float()
    # A token of zeros gets a positive scale too, to avoid a division by zero.
    scales = (states.abs().amax(1) / LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = states / scales[:, None]
    values = scaled.round() if dtype == "int8" else scaled
    return StoredStates(values=values.to(getattr(torch, dtype)), scales=scales)


def state_bytes(width: int, dtype: str) -> int:
    """Return the bytes on disk of a token's vector of `width` elements."""
    return width * getattr(torch, dtype).itemsize + (SCALE_BYTES if dtype in LARGEST else 0)
