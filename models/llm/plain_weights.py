"""A target's weights as plain numbers, for drafters that are initialised from them."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .hf_target import HFTarget


def require_plain_weights(module: nn.Module, remedy: str) -> None:
    """Raise ValueError if linear layers of a module have no plain weights to copy.

    Quantised layers have none.
    """
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        plain = (type(weight) is nn.Parameter or isinstance(weight, DTensor)) and weight.is_floating_point()
        if name.endswith(("proj", "fc1", "fc2")) and not plain:
            raise ValueError(f"the target is quantised, and a drafter can't start with its layers: {remedy}")


def require_resident_weights(target: HFTarget, remedy: str) -> None:
    """Raise ValueError if a target's layers are streamed, or in other processes."""
    if not target.has_layers:
        raise ValueError(
            f"the target's layers are in other processes (target.stage_layers), so their weights can't be copied: {remedy}"
        )
    if target.stream is not None:
        raise ValueError(
            "the target's layers are read from its files during passes (target.memory_budget_gib), so their weights can't be "
            f"copied: {remedy}"
        )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter in full. If it is sliced, all processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
