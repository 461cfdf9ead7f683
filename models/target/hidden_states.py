"""What goes on inside a model of transformers: its decoder's layers, what each of them reads, and what the head reads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel


class DeepEnough(Exception):  # noqa: N818 - it is no error
    """Ends a pass of which no more is wanted."""


class PassStates:
    """What a forward pass computed: the last hidden states after the final norm, and layers' inputs."""

    last: torch.Tensor
    layer_inputs: torch.Tensor | None


class CapturedHiddenStates:
    """Catches what the decoder hands to the head, for every position, without asking for all layers' states; and what goes into
    the layers named in `layers`.

    The hooks stay on the model until `detach`, since a compiled model would be compiled anew for every other one.
    """

    _of_models: ClassVar[WeakKeyDictionary[PreTrainedModel, "CapturedHiddenStates"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.layers: tuple[int, ...] = ()
        self._awaited = False
        self._hidden_states: torch.Tensor | None = None
        self._inputs: dict[int, torch.Tensor] = {}
        self._last_layer: int | None = None
        self._hooks: list[RemovableHandle] = []

    @classmethod
    def of(cls, model: PreTrainedModel) -> "CapturedHiddenStates":
        """The model's own, on it: all targets around a model share one."""
        own = cls._of_models.get(model) or cls._of_models.setdefault(model, cls())
        if not own._hooks:
            own._attach(model)
        return own

    def _attach(self, model: PreTrainedModel) -> None:
        decoder = model.get_decoder()  # some models call it past their base model
        self._hooks.append(decoder.register_forward_hook(self._capture))
        for index, layer in enumerate(decoder_layers(model)):
            hook = partial(self._capture_input, index)
            self._hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))

    def detach(self) -> None:
        """Take the hooks off the model; `of` puts them on again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def states_of_pass(self, layers: tuple[int, ...] = ()) -> Iterator["PassStates"]:
        """Record the hidden states of the forward pass within the block, and the inputs of `layers`.

        They are there when the block has ended. Other passes are not recorded, and nothing of this one
        is kept here. `layers` stay set: compiled code depends on them.
        """
        self.layers, self._awaited = layers, True
        states = PassStates()
        try:
            yield states
            assert self._hidden_states is not None, "the model has not been run"
            states.last = self._hidden_states
            states.layer_inputs = self._side_by_side() if layers else None
        finally:
            self._awaited, self._hidden_states = False, None
            self._inputs.clear()

    def _capture(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._awaited:
            self._hidden_states = output[0]

    def _capture_input(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if index in self.layers:
            self._inputs[index] = args[0] if args else kwargs["hidden_states"]
            if index == self._last_layer:
                raise DeepEnough

    def inputs_of(self, layers: tuple[int, ...], run: Callable[[], object]) -> torch.Tensor:
        """Run the model, no further than to the last of these layers; their inputs, side by side."""
        self.layers, self._last_layer = layers, max(layers)
        try:
            run()
        except DeepEnough:
            return self._side_by_side()
        finally:
            self.layers, self._last_layer = (), None
            self._inputs.clear()
        raise AssertionError("the model has not read all of its layers")

    def _side_by_side(self) -> torch.Tensor:
        return torch.cat([self._inputs.pop(index) for index in self.layers], dim=-1)


def decoder_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The model's layers, in order; none where its decoder has no such list."""
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next((list(each) for each in lists if len(each) == num_layers), [])
