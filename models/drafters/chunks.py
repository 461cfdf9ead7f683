"""Chunks of a loss: how large they are, and weights that they share under autocast."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

MAX_CHUNK = 2**26
"""Logits held at a time: 256 MiB in float32, and a few times that while their loss is computed.

A smaller chunk costs time: for every chunk, a trained head's whole gradient is added up once more
(benchmarks/loss_memory.json)."""
CHUNK_SHARE = 80
"""On CUDA, logits in float32 may take a part of so much of the card's memory: 1 GiB of 80."""
FLOAT_BYTES = 4


def max_chunk(device: torch.device) -> int:
    """Return the number of logits that a loss holds at a time on `device`.

    It depends on the card's memory, not on the free part, so that a run repeats its rounding.
    """
    if device.type != "cuda":
        return MAX_CHUNK
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(MAX_CHUNK, memory // (CHUNK_SHARE * FLOAT_BYTES))


class SharedCasts(TorchFunctionMode):
    """Casts each weight of a linear layer once for autocast, inside calls of `shared`.

    Autocast keeps its casts until its block ends. A chunk that is recomputed in the backward pass
    enters autocast anew, so each chunk would cast a trained head once more. The values and the
    gradients are the same as autocast's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._casts: dict[torch.Tensor, torch.Tensor] = {}

    def shared(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with shared casts."""

        def call(*args: Any) -> Any:
            with self:
                return function(*args)

        return call

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and len(args) > 1:
            args = (args[0], self._cast(args[1]), *args[2:])
        return function(*args, **(kwargs or {}))

    def _cast(self, weight: torch.Tensor) -> torch.Tensor:
        device = weight.device.type
        trained = weight.is_leaf and weight.requires_grad and weight.dtype == torch.float32
        if not (trained and torch.is_autocast_enabled(device)):
            return weight
        if weight not in self._casts:
            self._casts[weight] = weight.to(torch.get_autocast_dtype(device))
        return self._casts[weight]
