"""Decoder layers of drafters, of the target's kind or of another named form, and the base class of drafters with such."""

import copy
import inspect
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Float, Int
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from ..decoding.types import Counts, Prompts, TargetOutput
from ..llm.hf_target import HFTarget
from ..llm.hidden_states import decoder_layers, decoder_of, layer_configs
from ..llm.recurrent_states import find_mixers
from ..llm.tree_attention import FULL
from ..llm.tree_attention import IMPLEMENTATION as GROUPED_HEADS
from ..llm.tree_cache import TreeCache
from .branches import Entries
from .cached_drafter import CachedDrafter, CachedText
from .shared_options import FORM_OPTIONS

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""Modules that a layer must consist of. Another norm would have an unknown position."""
ATTENTION = [f"{name}_proj" for name in ("q", "k", "v", "o")]
PROJECTIONS = {
    *(f"self_attn.{name}" for name in ATTENTION),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}

FORMS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen2": (Qwen2Config, Qwen2DecoderLayer, Qwen2RotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}
"""Configuration, layer and rotary embeddings of the forms that a drafter may have."""


def form_config(target: HFTarget, form: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of one layer of a form.

    Options that the form leaves out are the target's.
    """
    target_config = layer_configs(target.model)[0]
    make_config = FORMS[form["model_type"]][0]
    is_target_kind = target_config.model_type == form["model_type"]
    names = FORM_OPTIONS if is_target_kind else FORM_OPTIONS - {"attention_bias", "mlp_bias"}
    options = {name: getattr(target_config, name) for name in names if getattr(target_config, name, None) is not None}
    if rope := options.get("rope_parameters"):
        if all(isinstance(value, Mapping) for value in rope.values()):
            # One set for each type of layer; the first layer's, as in `LayerDrafter`, if it has rotary embeddings.
            rope = rope.get(target_config.layer_types[0]) or next(iter(rope.values()))
        # A form rotates all dimensions of a head.
        options["rope_parameters"] = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    if "head_dim" in options and "num_attention_heads" in form:
        del options["head_dim"]  # recomputed from the number of heads
    options |= {name: value for name, value in form.items() if name != "model_type"}
    try:
        config = make_config(
            **copy.deepcopy(options),
            hidden_size=target_config.hidden_size,
            vocab_size=target_config.vocab_size,
            max_position_embeddings=target.context_length,
            num_hidden_layers=1,
        )
        require_heads_that_divide(config)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ValueError(f"transformers can't build a layer of drafter.layer {dict(form)} ({error})") from error
    return config


def require_heads_that_divide(config: Any) -> None:
    """Raise ValueError for heads that attention can't compute.

    Transformers builds such layers, and some kernels then divide by zero, which ends the process.
    """
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads is {num_heads} and num_key_value_heads {num_kv_heads}; the first must be a multiple of the "
            "second, and an option that is left out is the target's: set both"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary embeddings need an even number")


Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of rotary embeddings."""


class LayerDrafter(CachedDrafter):
    """A drafter with decoder layers, which reads the target's embeddings."""

    own_rotary: nn.Module | None
    """Rotary embeddings of layers of a named form; None if they use the target's."""

    def share(self, target: HFTarget, form: Mapping[str, Any] | None, kind: str | None = None) -> None:
        """Share the target's parts with layers of this form; if it is None, the layers are like the target's.

        Some models have other rotary embeddings for each kind of layer. If `kind` is None, they are the first layer's, as
        in `make_layer`.
        """
        self.own_rotary = None if form is None else FORMS[form["model_type"]][2](form_config(target, form))
        rotary: Any = self.own_rotary or decoder_of(target.model).rotary_emb
        # References only: in a tuple, the target's parts are neither saved nor trained with the drafter.
        self._target_parts = target.embed_tokens, rotary
        self._rotary_options = {}
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            self._rotary_options["layer_type"] = kind or target.model.config.get_text_config().layer_types[0]

    @abstractmethod
    def write(self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, cache: TreeCache) -> None:
        """Add an entry for each feature [batch, entry, feature], at positions [1, entry].

        Its token in `tokens` [batch, entry] is the one after the feature's.
        """

    def begin(self, cache: TreeCache, prompts: Prompts, prefill: TargetOutput) -> CachedText:
        features, (batch, num_tokens) = self.target_features(prefill), prompts.input_ids.shape
        assert features is not None
        # A feature goes with the token after it. At least one entry is read, even if it isn't kept: the cache then has its
        # memory before anything is recorded.
        num_read = max(1, num_tokens - 1)
        cache.begin_prefill(batch, num_read)
        positions = torch.arange(num_read, device=features.device)[None]
        self.write(prompts.input_ids[:, -num_read:], features[:, :num_read], positions, cache)
        cache.keep(None, Counts.of([length - 1 for length in prompts.lengths], features.device))
        return CachedText(
            cache=cache,
            unread_tokens=prompts.last(prompts.input_ids)[:, None],
            unread_features=prompts.last(features)[:, None],
            num_unread=Counts.of([1] * batch, features.device),
        )

    def embed(self, tokens: Int[torch.Tensor, "*batch"]) -> Float[torch.Tensor, "*batch hidden"]:
        """Return the target's embeddings in the drafter's dtype."""
        embeddings: torch.Tensor = self._target_parts[0](tokens)
        return embeddings.to(next(self.parameters()).dtype)

    def rotation(self, like: torch.Tensor, positions: Int[torch.Tensor, "rows seq"]) -> Rotation:
        """Return the rotary embeddings of positions, in the type of `like`."""
        rotary = self._target_parts[1]
        rotations = rotary(like, positions, **self._rotary_options)
        if not isinstance(rotations, tuple):
            raise ValueError(
                f"{type(rotary).__name__} rotates by complex numbers, and this drafter's layer by pairs of sines and cosines; "
                "choose another drafter, such as redrafter"
            )
        cos, sin = rotations
        return cos, sin


def make_layer(target: HFTarget, input_width: int, form: Mapping[str, Any] | None = None) -> Any:
    """Build a fresh layer of this form, or of the target's kind if `form` is None.

    Its attention reads vectors of `input_width`. Raises ValueError if the target's layers have
    another structure.
    """
    # 1. A named form is independent of the target's layers.
    if form is not None:
        return _widened(FORMS[form["model_type"]][1], form_config(target, form), input_width)
    # 2. The target's layers must have the expected modules, unscaled residuals and rotary
    # embeddings.
    layer = target.layer_template()
    names = {name for name, _ in layer.named_modules()} if layer else set()
    is_plain = {name for name in names if name and "." not in name} == LAYER_PARTS and names >= PROJECTIONS
    if layer is None or not is_plain or find_mixers(layer):
        raise ValueError(
            f"the decoder layers of {type(target.model).__name__} don't consist of attention (q, k, v and o projections), a "
            "gated MLP and a norm before each, so this drafter can't copy their architecture; name another one with "
            "drafter.layer={model_type: llama} and drafter.init=random, or choose another drafter, such as redrafter"
        )
    norms_have_weights = {"input_layernorm.weight", "post_attention_layernorm.weight"} <= {
        name for name, _ in layer.named_parameters()
    }
    if not norms_have_weights or getattr(target.model.config.get_text_config(), "residual_multiplier", 1.0) != 1.0:
        raise ValueError(
            f"the decoder layers of {type(target.model).__name__} scale their residual stream, or have norms without weights, "
            "which this drafter's layer doesn't do; choose the drafter redrafter"
        )
    if "rotary_emb" not in dict(decoder_of(target.model).named_children()):
        raise ValueError(
            f"{type(target.model).__name__} has no rotary embeddings, which this drafter's layer needs; choose the drafter "
            "redrafter"
        )
    # 3. Build a layer of the target's kind.
    return _widened(type(layer), copy.deepcopy(target.model.config.get_text_config()), input_width)


def make_full_layer(target: HFTarget) -> Any:
    """Build a fresh layer like the last one of the target's that attends to the whole text.

    It has all that the target's layers have, such as experts, latent attention or gates. Raises ValueError for
    layers that are more than attention and MLP with a norm before each.
    """
    config = copy.deepcopy(target.model.config.get_text_config())
    config._attn_implementation = IMPLEMENTATION
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    template = target.layer_template()
    if template is not None and FULL in kinds:
        layer: Any = type(template)(config, layer_idx=max(index for index, kind in enumerate(kinds) if kind == FULL))
        is_plain = {name for name, _ in layer.named_children()} == LAYER_PARTS
        reads_all = is_plain and not any(hasattr(layer.self_attn, name) for name in ("indexer", "sinks"))
        has_rotary = "rotary_emb" in dict(decoder_of(target.model).named_children())
        if reads_all and has_rotary and getattr(config, "residual_multiplier", 1.0) == 1.0:
            layer.apply(target.model._init_weights)
            layer.self_attn.layer_idx = 0  # its cache has no other layer
            return layer
    raise ValueError(
        f"{type(target.model).__name__} has no layer that is plain attention to the whole text, with rotary embeddings, and an "
        "MLP, with a norm before each, and an MTP head is such a layer; choose another drafter, such as redrafter"
    )


def _widened(make: Any, config: Any, input_width: int) -> Any:
    config._attn_implementation = IMPLEMENTATION
    layer = make(config, layer_idx=0)
    others = [name for name, part in layer.self_attn.named_children() if isinstance(part, nn.Linear) and name not in ATTENTION]
    if others and input_width != config.hidden_size:
        raise ValueError(
            f"the attention of {make.__name__} has {others[0]} beside its usual projections, and this drafter's layer reads "
            "wider vectors than the target's; name another form with drafter.layer={model_type: llama} and "
            "drafter.init=random, or choose another drafter, such as redrafter"
        )
    for projection in ("q_proj", "k_proj", "v_proj"):
        old = getattr(layer.self_attn, projection)
        setattr(layer.self_attn, projection, nn.Linear(input_width, old.out_features, bias=old.bias is not None))
    return layer


@torch.no_grad()
def start_from_target(layer: Any, fc: nn.Linear, target: HFTarget) -> None:
    """Initialise the layer with the target's last layer; the last feature passes unchanged.

    The layer's output projections start at zero, and `fc` starts as the identity on the last part
    of its input. So the first outputs are the features themselves, at every depth. EAGLE-1's layer
    has no norm at its input, so its outputs would grow otherwise. If the attention reads a pair,
    both halves get the target's weights: each half is a vector of its residual stream.
    """
    # 1. Copy the target's last layer.
    last_layer = decoder_layers(target.model)[-1]
    require_copyable_weights(target, last_layer)
    source = dict(last_layer.named_parameters())
    for name, parameter in layer.named_parameters():
        weight = whole(source[name]) if name in source else None
        if weight is not None and weight.shape != parameter.shape and weight.ndim == 2:
            weight = torch.cat([weight, weight], dim=1)
        if weight is None or weight.shape != parameter.shape:
            raise ValueError(
                f"the layer of drafter.layer can't start with the target's weights: the target has no {name} of shape "
                f"{tuple(parameter.shape)}; set drafter.init=random"
            )
        parameter.copy_(weight)
    # 2. Zero the output projections, and make `fc` the identity on its last part.
    for parameter in (*layer.self_attn.o_proj.parameters(), *layer.mlp.down_proj.parameters(), *fc.parameters()):
        parameter.zero_()
    fc.weight[:, -fc.out_features :].fill_diagonal_(1.0)


IMPLEMENTATION = f"{__name__}.attention"
"""A package's copy of this module has another name."""


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
    """Compute attention by transformers' interface.

    Without a mask only keys and values are needed, and the cache already has them: return zeros.
    """
    if attention_mask is None:
        return query.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2), None
    if entries is not None:
        entries.branches[-1] = key, value  # the cache may have had latents
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return entries.attend(query, attention_mask, scale).transpose(1, 2).contiguous(), None
    return ALL_ATTENTION_FUNCTIONS[GROUPED_HEADS](module, query, key, value, attention_mask, scaling=scaling, **kwargs)


# A mask is always passed when this name is used, so it needs no mask function.
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)


def require_copyable_weights(target: HFTarget, module: nn.Module) -> None:
    """Raise ValueError if weights of a target's module can't be copied.

    They may be in other processes, streamed, or quantised: such linear layers have no plain weights.
    """
    remedy = "set drafter.init=random"
    if not target.has_layers:
        raise ValueError(
            f"the target's layers are in other processes (target.stage_layers), so their weights can't be copied: {remedy}"
        )
    if target.stream is not None:
        raise ValueError(
            "the target's layers are read from its files during passes (target.memory_budget_gib), so their weights can't be "
            f"copied: {remedy}"
        )
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        plain = (type(weight) is nn.Parameter or isinstance(weight, DTensor)) and weight.is_floating_point()
        if name.endswith(("proj", "fc1", "fc2")) and not plain:
            raise ValueError(f"the target is quantised, and a drafter can't start with its layers: {remedy}")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter in full. If it is sliced, all processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
