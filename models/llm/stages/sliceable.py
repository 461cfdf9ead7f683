"""Which models can be divided into stages: those whose layers pass on nothing but hidden states."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..hidden_states import decoder_layers
from .slices import AbsentLayer, EndSlice

TEXTS = ([3, 4, 5, 6], [7, 7, 9, 8])
"""Two texts of one length. Apart from hidden states, layers must read the same for both."""


class LayerCall(NamedTuple):
    """Arguments of one call of a layer."""

    hidden: Any
    others: dict[str, Any]
    """All other arguments, by their names or places."""


@torch.no_grad()
def require_sliceable(ends: EndSlice) -> None:
    """Raise ValueError for a model that can't be divided into stages; the message has the reason.

    Runs the ends without layers for two texts, and compares what the layers are called with. So
    this works where the layers' weights are absent.
    """
    model, device = ends.model, ends.model.device
    if shared := getattr(model.config.get_text_config(), "num_kv_shared_layers", 0):
        raise _cannot(model, f"its last {shared} layers read keys and values of other layers")
    first, second = (torch.tensor([text], device=device) % model.config.get_text_config().vocab_size for text in TEXTS)
    # 1. Hidden states enter the first layer.
    hidden = ends.enter(first, torch.zeros_like(first))
    if hidden.shape != (*first.shape, model.config.get_text_config().hidden_size):
        raise _cannot(model, f"its first layer reads hidden states of the shape {list(hidden.shape)}")
    # 2. Only layers change them. Some models take the first element of a tuple.
    if not _passes_on(ends, first):
        for layer in decoder_layers(model):
            if isinstance(layer, AbsentLayer):
                layer.in_tuple = True
        if not _passes_on(ends, first):
            raise _cannot(model, "its layers return more than hidden states")
    calls = _calls(ends, first)
    if not all(torch.equal(call.hidden, calls[0].hidden) for call in calls):
        raise _cannot(model, "it changes hidden states between its layers")
    # 3. Nothing else that layers read depends on the text.
    for index, (call, other) in enumerate(zip(calls, _calls(ends, second), strict=True)):
        if name := _difference(call, other):
            raise _cannot(model, f"its layer {index} reads more of the text than hidden states ({name})")
    # 4. Neither does the output, apart from the last layer's.
    if not torch.equal(ends.leave(hidden, first).logits, ends.leave(hidden, second).logits):
        raise _cannot(model, "its logits depend on the text in another way than by its layers")


def _passes_on(ends: EndSlice, tokens: torch.Tensor) -> bool:
    """Return whether all hidden states of a pass have one shape, the last ones included."""
    try:
        states = [call.hidden for call in _calls(ends, tokens)]
        states.append(ends.leave(states[0]).hidden_states)
    except (IndexError, RuntimeError):
        return False
    return all(isinstance(one, torch.Tensor) and one.shape == states[0].shape for one in states)


def _calls(ends: EndSlice, tokens: torch.Tensor) -> list[LayerCall]:
    """Return how a pass over a text calls the layers."""
    calls: list[LayerCall] = []

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        others = {str(place): value for place, value in enumerate(args)} | kwargs
        calls.append(LayerCall(others.pop("0" if args else "hidden_states"), others))

    hidden = ends.enter(tokens, torch.zeros_like(tokens))
    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True, prepend=True) for layer in decoder_layers(ends.model)]
    try:
        ends.leave(hidden, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _difference(call: LayerCall, other: LayerCall) -> str:
    """Return the name of an argument that differs between two calls, or that layers may write to."""
    for name, value in call.others.items():
        one, two = list(_tensors(value)), list(_tensors(other.others.get(name)))
        is_equal = len(one) == len(two) and all(map(torch.equal, one, two))
        if not is_equal or (isinstance(value, dict | list) and not value):
            return name
    return ""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _cannot(model: PreTrainedModel, why: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} can't be divided into stages: {why}. Leave target.stage_layers out, or choose another target"
    )
