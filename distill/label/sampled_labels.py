"""Labels that are sampled from the target: each place of a text has its own random number."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from jaxtyping import Float, Int

from ...data.device import to_device
from ...models.decoding.sampling import Sampling, warp


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLabels:
    """How continuations are sampled; the tokens don't depend on batch, order or device.

    The uniform number `uniforms[b, j]` chooses token j of text b, in every continuation that
    reaches it: the first token whose cumulated probability exceeds it.
    """

    temperature: float
    uniforms: Float[torch.Tensor, "batch column"]

    @classmethod
    def of(
        cls, ids: Sequence[str], num_columns: int, *, temperature: float, seed: int, device: torch.device
    ) -> "SampledLabels":
        """Draw the numbers of these texts; they depend on the seed, a text's id, and the column."""
        sources = [Random(f"labels/{seed}/{id}") for id in ids]
        uniforms = [[source.random() for _ in range(num_columns)] for source in sources]
        return cls(temperature=temperature, uniforms=to_device(torch.tensor(uniforms, dtype=torch.float64), device))

    def choose(
        self, logits: Float[torch.Tensor, "position vocab"], uniforms: Float[torch.Tensor, " position"]
    ) -> Int[torch.Tensor, " position"]:
        """Return the tokens that these numbers choose."""
        # In float32 the sum over a large vocabulary would be off by more than rare tokens have.
        cumulated = warp(logits, Sampling(temperature=self.temperature)).double().cumsum(-1)
        chosen = torch.searchsorted(cumulated, uniforms[:, None] * cumulated[:, -1:], right=True)[:, 0]
        return chosen.clamp(max=logits.shape[-1] - 1)
