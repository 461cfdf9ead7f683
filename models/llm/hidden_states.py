"""Access to the inside of a model: its decoder's layers, their inputs, the head's input."""

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
    """Ends a pass early, when no later layer is needed."""


class PassStates:
    """Results of a forward pass: last hidden states after the norm, and layers' inputs."""

    last: torch.Tensor
    layer_inputs: torch.Tensor | None


class CapturedHiddenStates:
    """Hooks that record the last hidden states of a pass, and the inputs of some layers.

    transformers returns the hidden states of all layers or of none. These hooks record only what is
    needed. They stay on the model until `detach`: compiled code would be compiled again if the
    hooks changed.
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
        """Return the hooks of a model, which all targets of this model share."""
        captured = cls._of_models.get(model) or cls._of_models.setdefault(model, cls())
        if not captured._hooks:
            captured._attach(model)
        return captured

    def _attach(self, model: PreTrainedModel) -> None:
        decoder = decoder_of(model)  # some models call the decoder directly, not their base model
        self._hooks.append(decoder.register_forward_hook(self._capture))
        for index, layer in enumerate(decoder_layers(model)):
            hook = partial(self._capture_input, index)
            self._hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))

    def detach(self) -> None:
        """Remove the hooks from the model; `of` adds them again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def states_of_pass(self, layers: tuple[int, ...] = ()) -> Iterator["PassStates"]:
        """Record the hidden states of the forward pass in the block, and the inputs of `layers`.

        The yielded value holds them after the block; this object keeps no reference to them. Other
        passes are not recorded. `layers` stay set after the block, since compiled code depends on
        them.
        """
        self.layers, self._awaited = layers, True
        states = PassStates()
        try:
            yield states
            assert self._hidden_states is not None, "the model has not been run"
            states.last = self._hidden_states
            states.layer_inputs = features_of(self._side_by_side()) if layers else None
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
        """Run the model as far as the last of `layers`, and return their inputs, side by side."""
        self.layers, self._last_layer = layers, max(layers)
        try:
            run()
        except DeepEnough:
            return self._side_by_side()
        finally:
            self.layers, self._last_layer = (), None
            self._inputs.clear()
        raise AssertionError("the model has not run all of its layers")

    def _side_by_side(self) -> torch.Tensor:
        inputs = [self._inputs.pop(index) for index in self.layers]
        # A target's layers may be on several devices. The final norm is on the first one.
        device = inputs[0].device if self._hidden_states is None else self._hidden_states.device
        return torch.cat([states.to(device) for states in inputs], dim=-1)


def features_of(layer_inputs: torch.Tensor) -> torch.Tensor:
    """Return the inputs of layers. Raises ValueError if they have several hidden states of each token."""
    if layer_inputs.ndim != 3:
        raise ValueError(
            "the target's layers read several hidden states of each token, and no drafter reads such features; choose one that "
            "reads the last hidden states, such as redrafter"
        )
    return layer_inputs


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the part of a model with its layers and its final norm."""
    decoder = model.get_decoder()
    if decoder is not model:
        return decoder
    # transformers finds no part by the name that Llama 4 gives for it.
    return next((part for part in model.children() if isinstance(part, PreTrainedModel)), model)


def layer_configs(model: PreTrainedModel) -> Sequence[Any]:
    """Return the configuration of each layer. Layers of some models have heads of different sizes."""
    config = model.config.get_text_config()
    return list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)


def without_head(model: PreTrainedModel) -> Any:
    """Return a model without its head."""
    return decoder_of(model) if model.base_model is model else model.base_model


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the model's own list of its layers; a new empty list if its decoder has none."""
    config = model.config.get_text_config()
    # Some models have two attentions in a layer, and count each as a layer of the cache.
    counts = (config.num_hidden_layers, getattr(config, "num_layers", None))
    lists = [module for module in decoder_of(model).modules() if isinstance(module, nn.ModuleList)]
    return next((layers for count in counts for layers in lists if len(layers) == count), nn.ModuleList())
