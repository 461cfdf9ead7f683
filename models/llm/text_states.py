"""Hidden states that training reads from the target, for padded or packed texts."""

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
    """Return the target's last hidden states (None unless `last`) and the inputs of `layers`.

    The layers' inputs are side by side. The pass runs without gradients and without the head, in
    the target's type. Without `last` it runs no deeper than the last of `layers`. States on padding
    are meaningless.
    """
    if not last and not layers:
        return None, None
    shape = batch.input_ids.shape
    inputs = _inputs(batch)
    states, features = None, None
    for is_local, texts in turns(inputs, target.device) if target.tensor_parallel else [(True, inputs)]:
        if "position_ids" not in texts:
            texts = {**texts, "past_key_values": PassingCache()}
        outputs = target.read_texts(layers, **texts) if last else (None, target.layer_inputs(layers, **texts))
        if is_local:
            states, features = (None if output is None else output.reshape(*shape, -1) for output in outputs)
    return states, features


def _inputs(batch: DrafterBatch) -> dict[str, Any]:
    """Return the tensors that the model reads.

    Rows of one text need no mask: under causal attention no token sees the padding on its right.
    With a mask, attention would not use its fastest kernels, and the host would wait to check
    whether the mask hides anything. Packed texts in a row are separated by their positions, which
    start again at 0: transformers computes the block mask from them.
    """
    if batch.starts is None:
        return {"input_ids": batch.input_ids}
    return {"input_ids": batch.input_ids, "position_ids": batch.position_ids}


class PassingCache(DynamicCache):
    """A KV cache that keeps nothing: attention reads the keys and values of the pass itself.

    Without a cache, transformers looks for packed texts in the position ids, and the host waits for
    the result. Using a cache adds no new requirement: labelling has already read the target with a
    `DynamicCache`.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


@torch.no_grad()
def require_packing(target: HFTarget) -> None:
    """Raise ValueError if the target reads texts differently when they are packed into one row.

    Such a target finds positions by more than position ids, or attends across texts.
    """
    text = target.probe_ids[None]
    lengths = [8, 7]
    position_ids = torch.cat([torch.arange(length, device=target.device) for length in lengths])[None]
    together, _ = target.read_texts(input_ids=text, position_ids=position_ids)
    alone = torch.cat([target.read_texts(input_ids=part)[0] for part in text.split(lengths, dim=1)], dim=1).float()
    error = float((together.float() - alone).norm() / alone.norm())
    if not target.is_rounding(error):
        raise ValueError(
            f"{type(target.model).__name__} reads texts differently when they are packed into one row (relative error "
            f"{error:.2g} of its hidden states); set train.packing=false, or store the hidden states that training reads"
        )
