"""A target's weights as plain numbers, for drafters that begin with some of them."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def require_plain_weights(module: nn.Module, remedy: str) -> None:
    """Raise ValueError where linear layers of a module, or what stands in their place, hold no plain weights to copy."""
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        plain = (type(weight) is nn.Parameter or isinstance(weight, DTensor)) and weight.is_floating_point()
        if name.endswith(("proj", "fc1", "fc2")) and not plain:
            raise ValueError(f"the target is quantised, and a drafter can't begin with its layers: {remedy}")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter in full. Where it is in slices, all processes must ask for it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
