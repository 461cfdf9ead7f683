"""Slices of an unmodified model: a range of its layers, or its ends (embeddings, norm and head).

A slice runs the model's own code from its first line. Absent layers return their input. A hook
gives the first present layer the hidden states that another process has computed, and a pass ends
behind the last present layer. So a model may scale its embeddings, add positions, or cap its
logits: no code of it is copied or described here. Layers keep their places, which decide on their
windows, rotary embeddings and slots of the cache.

    ends      ids -> embeddings -+                  +-> norm -> head -> logits
    layers                       +-> layers i to j -+

This is right for models whose layers pass on nothing but hidden states (`require_sliceable`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import PreTrainedModel

from ...decoding.types import TargetOutput
from ..hidden_states import CapturedHiddenStates, DeepEnough, decoder_layers, decoder_of
from ..recurrent_states import find_mixers
from ..streamed_loading import Skeleton, load_parts

Hidden = Float[torch.Tensor, "1 entry hidden"]


class Aborted(Exception):  # noqa: N818 - it is no error
    """Ends the pass of a cancelled run before its next layer."""


class AbsentLayer(nn.Module):
    """Substitute for a layer of another process: it returns its input.

    With `in_tuple` it returns a tuple, whose first element some models take.
    """

    def __init__(self, layer: nn.Module, *, in_tuple: bool) -> None:
        super().__init__()
        # Models read attributes of their layers, such as the kind of attention.
        public = {name: value for name, value in vars(layer).items() if not name.startswith("_") and name != "training"}
        self.__dict__.update(public)
        self.in_tuple = in_tuple

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states,) if self.in_tuple else hidden_states


def remove_layers(model: PreTrainedModel, present: range, *, in_tuple: bool) -> None:
    """Replace the layers outside `present` by `AbsentLayer`s.

    Raises ValueError if the model has no list of layers, or too few layers.
    """
    layers = decoder_layers(model)
    if len(layers) < max(1, present.stop):
        raise ValueError(
            f"{type(model).__name__} has {len(layers) or 'no list of'} layers, and target.stage_layers needs "
            f"{max(1, present.stop)}; change target.stage_layers, or leave it out"
        )
    for index, layer in enumerate(layers):
        if index not in present and not isinstance(layer, AbsentLayer):
            layers[index] = AbsentLayer(layer, in_tuple=in_tuple)


def units_of(skeleton: Skeleton) -> list[tuple[str, nn.Module]]:
    """Return the layers of a model, and an untied head. Raises ValueError if they can't be divided."""
    if find_mixers(skeleton.model):
        raise ValueError(
            f"{type(skeleton.model).__name__} has recurrent layers, whose states can't hold several drafts at once; leave "
            "target.stage_layers out"
        )
    return skeleton.units()


class LayerSlice:
    """Some layers of a model, from hidden states to hidden states. `layers` are their places."""

    def __init__(self, model: PreTrainedModel, layers: range) -> None:
        self.model, self.layers = model, layers
        self._received: torch.Tensor | None = None
        self._result: torch.Tensor | None = None
        self._is_cancelled: Callable[[], bool] = lambda: False

    @classmethod
    def cut(cls, model: PreTrainedModel, layers: range) -> "LayerSlice":
        """Remove the other layers from a model, and return the slice that is left."""
        # The hook of the first layer ignores what absent layers return, so tuples serve every model.
        remove_layers(model, layers, in_tuple=True)
        part = cls(model, layers)
        first, *others = part.modules
        first.register_forward_pre_hook(part._begin, with_kwargs=True)
        for layer in others:
            layer.register_forward_pre_hook(part._poll)
        part.modules[-1].register_forward_hook(part._end)
        return part

    @classmethod
    def load(cls, skeleton: Skeleton, layers: range, device: torch.device) -> "LayerSlice":
        """Load some layers of a model that was built without weights. Nothing else is read."""
        units = units_of(skeleton)
        part = cls.cut(skeleton.model, layers)
        load_parts(skeleton, dict(units[layers.start : layers.stop]), device)
        return part

    @property
    def modules(self) -> list[nn.Module]:
        """The present layers."""
        return [*decoder_layers(self.model)[self.layers.start : self.layers.stop]]

    @property
    def device(self) -> torch.device:
        return next(self.modules[0].parameters()).device

    def run(self, hidden: Hidden, *, is_cancelled: Callable[[], bool], **arguments: Any) -> Hidden | None:
        """Run the layers. Returns None if `is_cancelled` became true before one of them.

        `arguments` are the decoder's, as `TreeReader` makes them.
        """
        self._received, self._is_cancelled = hidden, is_cancelled
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        try:
            decoder_of(self.model)(input_ids=ids, **arguments)
        except DeepEnough:
            return self._result
        except Aborted:
            return None
        finally:
            self._received = self._result = None
        raise AssertionError("the model has not run all of its layers")

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        assert self._received is not None, "a slice runs by `run` only"
        self._poll()
        return replaced(self._received, args, kwargs)

    def _poll(self, *_: Any) -> None:
        if self._is_cancelled():
            raise Aborted

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._result = output if isinstance(output, torch.Tensor) else output[0]
        raise DeepEnough


class EndSlice:
    """The ends of a model: token ids to hidden states, and hidden states to logits.

    A pass of the model that isn't one of these two raises ValueError.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layer_kind: Any = type(next(iter(decoder_layers(model)), None))
        """Class of the first layer."""
        self._received: torch.Tensor | None = None

    @classmethod
    def cut(cls, model: PreTrainedModel) -> "EndSlice":
        """Remove all layers from a model, and return its ends."""
        ends = cls(model)
        remove_layers(model, range(0), in_tuple=False)
        layers = decoder_layers(model)
        layers[0].register_forward_pre_hook(ends._require_pass)
        layers[-1].register_forward_pre_hook(ends._inject, with_kwargs=True)
        return ends

    @classmethod
    def load(cls, skeleton: Skeleton, device: torch.device) -> "EndSlice":
        """Load the ends of a model that was built without weights. No layer is read."""
        units_of(skeleton)
        ends = cls.cut(skeleton.model)
        load_parts(skeleton, {"embeddings, norm and head": skeleton.model}, device)
        return ends

    def enter(self, tokens: Int[torch.Tensor, "1 entry"], position_ids: Int[torch.Tensor, "1 entry"]) -> torch.Tensor:
        """Return the input of the first layer: in a model that can be sliced, hidden states."""
        run = partial(decoder_of(self.model), input_ids=tokens, position_ids=position_ids, **_nothing_to_attend(tokens))
        return CapturedHiddenStates.of(self.model).inputs_of((0,), run)

    def leave(self, hidden: torch.Tensor, tokens: Int[torch.Tensor, "1 entry"] | None = None, **options: Any) -> TargetOutput:
        """Return the output of the whole model for the output of its last layer.

        `options` are the model's. `tokens` change nothing in a model that can be sliced.
        """
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device) if tokens is None else tokens
        self._received = hidden
        try:
            with CapturedHiddenStates.of(self.model).states_of_pass() as states:
                output = self.model(input_ids=tokens, position_ids=tokens * 0, **_nothing_to_attend(tokens), **options)
        finally:
            self._received = None
        return TargetOutput(logits=output.logits, hidden_states=states.last)

    def _require_pass(self, *_: Any) -> None:
        if self._received is None:
            raise ValueError(
                f"the layers of {type(self.model).__name__} are in other processes (target.stage_layers), and this needs them "
                "here; leave target.stage_layers out"
            )

    def _inject(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        assert self._received is not None
        return replaced(self._received, args, kwargs)


def replaced(hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return a layer's arguments with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})


def _nothing_to_attend(tokens: torch.Tensor) -> dict[str, Any]:
    """Return arguments of a pass without layers, so that the model builds no mask."""
    return {"attention_mask": torch.zeros(1, 1, tokens.shape[1], 1, device=tokens.device), "use_cache": False}


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
