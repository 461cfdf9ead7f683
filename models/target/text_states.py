"""What training reads of the target: its states of a batch's texts, each in a row of its own or several behind each other."""

from typing import Any

import torch
from jaxtyping import Float
from transformers import DynamicCache

from ...data.types import DrafterBatch
from .hf_target import HFTarget
from .tensor_parallel import turns

LastStates = Float[torch.Tensor, "batch seq hidden"]
LayerInputs = Float[torch.Tensor, "batch seq feature"]


@torch.no_grad()
def states_of_texts(
    target: HFTarget, batch: DrafterBatch, *, last: bool, layers: tuple[int, ...]
) -> tuple[LastStates | None, LayerInputs | None]:
    """The target's last hidden states, where `last` asks for them, and the inputs of `layers`, side by side.

    Runs without gradients, in the target's own type, without its head, and without the last states no deeper than the last of
    `layers`. Meaningless on padding.
    """
    if not last and not layers:
        return None, None
    shape = batch.input_ids.shape
    own = _inputs(batch)
    states, features = None, None
    for is_own, inputs in turns(own, target.device) if target.tensor_parallel else [(True, own)]:
        if "position_ids" not in inputs:
            inputs = {**inputs, "past_key_values": PassingCache()}
        read = target.read_texts(layers, **inputs) if last else (None, target.layer_inputs(layers, **inputs))
        if is_own:
            states, features = (None if each is None else each.reshape(*shape, -1) for each in read)
    return states, features


def _inputs(batch: DrafterBatch) -> dict[str, Any]:
    """The tensors that the model reads.

    Rows of one text need no mask: under causal attention no token sees the padding on its right. With a mask, attention would
    run without its fastest kernels, and the host would wait to learn whether the mask hides anything. Several texts in a row
    are told apart by their positions, which start again at 0: transformers makes the block mask from them.
    """
    if batch.starts is None:
        return {"input_ids": batch.input_ids}
    return {"input_ids": batch.input_ids, "position_ids": batch.position_ids}


class PassingCache(DynamicCache):
    """A KV cache that keeps nothing: attention reads the keys and values of the pass itself, as it does without a cache.

    Without one, transformers looks for packed texts in the position ids, and the host waits for the answer. The target has been
    read with a `DynamicCache` before: when its texts were labelled.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


@torch.no_grad()
def require_packing(target: HFTarget) -> None:
    """Raise ValueError where the target reads texts differently when they stand in one row.

    Something beside position ids tells it then where a token stands, or it attends across texts.
    """
    text = torch.arange(3, 15, device=target.device)[None] % target.vocab_size
    lengths = [7, 5]
    position_ids = torch.cat([torch.arange(length, device=target.device) for length in lengths])[None]
    together, _ = target.read_texts(input_ids=text, position_ids=position_ids)
    alone = torch.cat([target.read_texts(input_ids=part)[0] for part in text.split(lengths, dim=1)], dim=1).float()
    error = float((together.float() - alone).norm() / alone.norm())
    if not error < target.rounding:  # NaN is below nothing
        raise ValueError(
            f"{type(target.model).__name__} reads texts differently when they stand in one row (relative error {error:.2g} of "
            "its hidden states), so they can't be packed; set train.packing=false, or store the states that training reads"
        )
