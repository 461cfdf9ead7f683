"""A target's weights as plain numbers, for drafters that are initialised from them."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def require_plain_weights(module: nn.Module, remedy: str) -> None:
    """Raise ValueError if linear layers of a module have no plain weights to copy.

    Quantised layers have none.
    """
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        plain = (type(weight) is nn.Parameter or isinstance(weight, DTensor)) and weight.is_floating_point()
        if name.endswith(("proj", "fc1", "fc2")) and not plain:
            raise ValueError(f"the target is quantised, and a drafter can't start with its layers: {remedy}")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter in full. If it is sliced, all processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
