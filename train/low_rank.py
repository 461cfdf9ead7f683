"""Training of a low-rank change in place of whole matrices (LoRA: Hu et al., arXiv 2106.09685, section 4.1)."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..models.drafters.saved.low_rank import has_factors


class LowRankAdamW(torch.optim.AdamW):
    """AdamW over the factors of each matrix's change.

    A parameter is W + U V at all times, so the drafter computes its loss, decodes and is saved as always. By the chain
    rule, U's gradient is G V^T, and V's is U^T G, for the gradient G of the parameter. What has no room for factors, such
    as vectors, is trained whole.
    """

    def __init__(self, groups: list[dict[str, Any]], rank: int, *, lr: float, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)  # the same factors in all processes
        self._matrices = list[tuple[nn.Parameter, torch.Tensor, nn.Parameter, nn.Parameter]]()
        super().__init__(
            [{**group, "params": [of for weight in group["params"] for of in self._trained(weight, rank)]} for group in groups],
            lr=lr,
        )

    def _trained(self, weight: nn.Parameter, rank: int) -> list[nn.Parameter]:
        """Return what is trained for a parameter: U = 0 and a random V, or itself."""
        if not has_factors(weight.shape, rank):
            return [weight]
        *stack, out, width = weight.shape
        drawn = torch.randn(*stack, rank, width, generator=self._generator) / math.sqrt(width)
        up, down = nn.Parameter(weight.new_zeros(*stack, out, rank)), nn.Parameter(drawn.to(weight))
        self._matrices.append((weight, weight.detach().clone(), up, down))
        return [up, down]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change the factors, and the parameters with them."""
        for weight, _, up, down in self._matrices:
            if (gradient := weight.grad) is not None:
                up.grad, down.grad = gradient @ down.mT, up.mT @ gradient
        super().step()
        for weight, before, up, down in self._matrices:
            weight.copy_(before + up @ down)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of the parameters included."""
        super().zero_grad(set_to_none)
        for weight, *_ in self._matrices:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's state, and the factors."""
        return {**super().state_dict(), "factors": [[up.detach(), down.detach()] for *_, up, down in self._matrices]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a `state_dict`. Raises ValueError for one of other shapes."""
        state = dict(state_dict)
        factors = state.pop("factors")
        super().load_state_dict(state)
        for (*_, up, down), (known_up, known_down) in zip(self._matrices, factors, strict=True):
            up.copy_(known_up)
            down.copy_(known_down)
