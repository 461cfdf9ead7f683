"""The decoder layer of EAGLE's drafters: one of the target's own kind, with weights of its own."""

import copy
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..hf_target import HFTarget
from ..hidden_states import decoder_layers
from ..tree_attention import IMPLEMENTATION as GROUPED_HEADS
from ..weights import require_plain_weights, whole
from .branch_attention import Entries

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""Exactly these: another norm would have its place, which isn't known."""
PROJECTIONS = {
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}


def make_layer(target: HFTarget, input_width: int) -> Any:
    """A fresh layer of the target's own kind, whose attention reads vectors of `input_width`.

    Raises ValueError where the target's layers are built differently.
    """
    layers = decoder_layers(target.model)
    names = {name for name, _ in layers[0].named_modules()} if layers else set()
    if {name for name in names if name and "." not in name} != LAYER_PARTS or not names >= PROJECTIONS:
        raise ValueError(
            f"the decoder layers of {type(target.model).__name__} aren't built of attention (q, k, v and o projections), a "
            "gated MLP and a norm before each, so this drafter can't take over their form; choose the drafter redrafter"
        )
    norms_have_weights = {"input_layernorm.weight", "post_attention_layernorm.weight"} <= {
        name for name, _ in layers[0].named_parameters()
    }
    if not norms_have_weights or getattr(target.model.config.get_text_config(), "residual_multiplier", 1.0) != 1.0:
        raise ValueError(
            f"the decoder layers of {type(target.model).__name__} scale their residual stream, or have norms without weights, "
            "which this drafter's layer doesn't; choose the drafter redrafter"
        )
    if "rotary_emb" not in dict(target.model.get_decoder().named_children()):
        raise ValueError(
            f"{type(target.model).__name__} has no rotary embeddings, which this drafter's layer needs; choose the drafter "
            "redrafter"
        )
    config: Any = copy.deepcopy(target.model.config.get_text_config())
    config._attn_implementation = IMPLEMENTATION
    make: Any = type(layers[0])
    layer = make(config, layer_idx=0)
    for projection in ("q_proj", "k_proj", "v_proj"):
        old = getattr(layer.self_attn, projection)
        setattr(layer.self_attn, projection, nn.Linear(input_width, old.out_features, bias=old.bias is not None))
    return layer


@torch.no_grad()
def start_from_target(layer: Any, fc: nn.Linear, target: HFTarget) -> None:
    """Let the layer begin as the target's last one, but add nothing yet, and `fc` let through the last of its inputs as it is.

    So the first outputs are the features themselves, at every depth: EAGLE-1's layer, which has no norm at its input, would
    blow them up otherwise. Where the attention reads a pair, both halves begin with the target's weights: either is a vector of
    its residual stream.
    """
    require_plain_weights(decoder_layers(target.model)[-1], "set drafter.init=random")
    source = dict(decoder_layers(target.model)[-1].named_parameters())
    for name, parameter in layer.named_parameters():
        weight = whole(source[name])
        parameter.copy_(weight if weight.shape == parameter.shape else torch.cat([weight, weight], dim=1))
    for parameter in (*layer.self_attn.o_proj.parameters(), *layer.mlp.down_proj.parameters(), *fc.parameters()):
        parameter.zero_()
    fc.weight[:, -fc.out_features :].fill_diagonal_(1.0)


IMPLEMENTATION = "outrider_drafter"


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    entries: Entries | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. Without a mask only keys and values are wanted, and the cache has them already."""
    if attention_mask is None:
        return torch.zeros_like(query).transpose(1, 2), None
    if entries is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return entries.attend(query, attention_mask, scale).transpose(1, 2).contiguous(), None
    return ALL_ATTENTION_FUNCTIONS[GROUPED_HEADS](module, query, key, value, attention_mask, scaling=scaling, **kwargs)


# Masks are always given under this name, so it needs no mask function.
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)
