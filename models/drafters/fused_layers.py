"""Drafters that read several layers of the target: which layers, and what they read."""

import torch
from jaxtyping import Float
from torch import nn

from ...data.types import DrafterBatch
from ..decoding.types import TargetOutput

DEEP_TARGET, NUM_FEATURE_LAYERS = 12, 5
"""Block drafters read targets of at least DEEP_TARGET layers at NUM_FEATURE_LAYERS layers by default."""


def default_feature_layers(num_layers: int) -> list[int]:
    """Return an early, a middle and a late layer: the layers that EAGLE-3's release reads."""
    return sorted({min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3)})


def spread_feature_layers(num_layers: int) -> list[int]:
    """Return the layers that a block drafter reads by default."""
    if num_layers < DEEP_TARGET:
        return default_feature_layers(num_layers)
    last, steps = num_layers - 3, NUM_FEATURE_LAYERS - 1
    return [round(2 + (last - 2) * step / steps) for step in range(NUM_FEATURE_LAYERS)]


class FusedLayers(nn.Module):
    """Mixin of drafters that read several layers of the target, and not its last hidden states."""

    _feature_layers: tuple[int, ...]

    def choose_feature_layers(self, layers: list[int], num_layers: int) -> None:
        """Read the inputs of these layers. Raises ValueError for layers that the target lacks."""
        if not num_layers:
            raise ValueError(
                "the target's layers can't be found in its model, and this drafter reads some; choose redrafter or medusa"
            )
        if not all(layer < num_layers for layer in layers):
            raise ValueError(f"drafter.feature_layers is {layers}; the target has the layers 0 to {num_layers - 1}")
        self._feature_layers = tuple(layers)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._feature_layers

    @property
    def reads_hidden_states(self) -> bool:
        return False

    def target_features(self, source: TargetOutput | DrafterBatch) -> Float[torch.Tensor, "batch seq feature"]:
        """Return the features that the drafter reads. Raises ValueError if they are missing."""
        if source.features is None:
            raise ValueError("the drafter reads features of the target's layers, and there are none; distil or recompute them")
        return source.features
