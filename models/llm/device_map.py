"""A target over several devices of one process: each device holds some of its layers.

transformers loads each part to its device, and its hooks (accelerate's) move the inputs of a layer to
the layer's device. Embeddings, final norm and head share the first device, where drafters, logits
and hidden states are: so drafters read from one device, as with a whole target. The devices work one
after the other. This is for a target that doesn't fit on one of them, and not for speed.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..machine import parse_device
from .config import AUTO
from .hidden_states import decoder_layers


def divide_layers(num_layers: int, room: Sequence[int]) -> list[int]:
    """Return how many consecutive layers each device gets, in proportion to its room in bytes."""
    total = sum(room)
    ends = [round(num_layers * part / total) for part in accumulate(room)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def resolve(device_map: Any, model: PreTrainedModel) -> dict[str, torch.device]:
    """Return the device of each layer of a model, and of each module beside its layers.

    `model` needs no weights. Raises ValueError for a map that leaves a module out or names an
    unknown one, for devices that don't exist or differ in kind, and for a map that separates
    embeddings, norm and head.
    """
    # 1. The layers, and what is beside them.
    layers, ends = _parts(model)
    # 2. Their devices.
    if device_map == AUTO:
        return _divided(layers, ends)
    devices = _looked_up(device_map, [*ends, *layers], {name for name, _ in model.named_modules()})
    # 3. Check the devices.
    kinds = {device.type for device in devices.values()}
    if len(kinds) > 1:
        raise ValueError(
            f"target.device_map names devices of several kinds ({', '.join(sorted(kinds))}); name accelerators only. For "
            "weights beyond their memory, use target.memory_budget_gib"
        )
    apart = {name: devices[name] for name in ends if devices[name] != devices[next(iter(ends))]}
    if apart:
        first = next(iter(ends))
        name, device = next(iter(apart.items()))
        raise ValueError(
            f"target.device_map has {first} on {devices[first]} and {name} on {device}; embeddings, final norm and head must "
            "share a device, which the drafters use too: move layers only"
        )
    return devices


def _parts(model: PreTrainedModel) -> tuple[dict[str, nn.Module], dict[str, nn.Module | torch.Tensor]]:
    """Return the layers of a model by name, and the modules and tensors beside them.

    Raises ValueError if the model has no list of layers.
    """
    wanted = decoder_layers(model)
    name = next((name for name, module in model.named_modules() if module is wanted), None)
    if name is None:
        raise ValueError(f"{type(model).__name__} has no list of layers that target.device_map could divide; leave it out")
    layers = {f"{name}.{index}": layer for index, layer in enumerate(wanted)}
    # Go down to the list, and collect what lies beside the way.
    ends: dict[str, nn.Module | torch.Tensor] = {}
    path, module = "", model.get_submodule("")
    for part in name.split("."):
        ends |= {f"{path}{child}": tensor for child, tensor in module.named_parameters(recurse=False)}
        ends |= {f"{path}{child}": tensor for child, tensor in module.named_buffers(recurse=False)}
        ends |= {f"{path}{child}": inner for child, inner in module.named_children() if child != part}
        path, module = f"{path}{part}.", module.get_submodule(part)
    return layers, ends


def _divided(layers: Mapping[str, nn.Module], ends: Mapping[str, nn.Module | torch.Tensor]) -> dict[str, torch.device]:
    """Divide the layers among all accelerators, in proportion to their free memory."""
    kind, count = torch.accelerator.current_accelerator(check_available=True), torch.accelerator.device_count()
    if kind is None or count < 2:
        raise ValueError(
            f"target.device_map is auto, and this process sees {count} accelerators; it divides the target among two or more: "
            "leave it out"
        )
    devices = [torch.device(kind.type, index) for index in range(count)]
    # The first device also has the ends.
    room = [torch.get_device_module(device).mem_get_info(device)[0] for device in devices]
    room[0] = max(0, room[0] - sum(map(_num_bytes, ends.values())))
    numbers = divide_layers(len(layers), room)
    of_layers = [device for device, number in zip(devices, numbers, strict=True) for _ in range(number)]
    return {**dict.fromkeys(ends, devices[0]), **dict(zip(layers, of_layers, strict=True))}


def _num_bytes(part: nn.Module | torch.Tensor) -> int:
    return part.nbytes if isinstance(part, torch.Tensor) else sum(tensor.nbytes for tensor in part.parameters())


def _looked_up(device_map: Mapping[str, int | str], names: Sequence[str], modules: set[str]) -> dict[str, torch.device]:
    """Look up each name by its longest prefix in the map. Raises ValueError if one has none."""
    if unknown := sorted(name for name in device_map if name not in modules and name not in names):
        raise ValueError(
            f"target.device_map names {', '.join(unknown)}, which the model doesn't have; its parts are {names[0]}, "
            f"{names[-1]} and the like, and '' stands for all others"
        )
    devices = {}
    for name in names:
        prefixes = [prefix for prefix in device_map if not prefix or f"{name}.".startswith(f"{prefix}.")]
        if not prefixes:
            raise ValueError(
                f"target.device_map has no device for {name}; add one, or add '' for all modules that it doesn't name"
            )
        device = device_map[max(prefixes, key=len)]
        devices[name] = parse_device(device)
    return devices


def devices_of_layers(model: PreTrainedModel) -> tuple[torch.device, ...]:
    """List the devices of a loaded model's layers, in order."""
    return tuple(next(layer.parameters()).device for layer in decoder_layers(model))
