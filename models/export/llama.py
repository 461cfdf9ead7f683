"""Common parts of the formats with decoder layers: a layer is described as a small Llama or Qwen3."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import nn
from transformers.activations import ACT2FN

from ...data.fields import OPTIONS, PositiveInt, one_of, problems_of, raise_problems
from ..drafters.decoder_layer import FORMS, form_config
from ..drafters.shared_options import FORM_OPTIONS
from ..llm.hf_target import HFTarget
from .folders import Folder

LAYER_WEIGHTS = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
)
QKV_BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
ROPE_OF_POSITIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings that depend only on their own parameters. Other kinds also depend on
the length of the context."""
ROPE_KINDS = ("rope_type", "type")
"""Keys of the kind of rotary embeddings: the current one of transformers, and that of older versions."""
GENERAL_KEYS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "max_sequence_length",
        "max_window_layers",
        "model_type",
        "pad_token_id",
        "pretraining_tp",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a configuration that don't affect weights or computation, unless a format's dataclass has
them."""
MOST = 1e12
"""Largest plausible base, factor or length."""
Positive = Annotated[float, Field(gt=0, le=MOST)]


@dataclass(kw_only=True, config=OPTIONS)
class LayerKeys:
    """Keys of a configuration that describe layers. Other values describe layers that drafters here don't have."""

    hidden_size: PositiveInt
    vocab_size: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    model_type: Annotated[str, one_of(*FORMS)] = "llama"
    hidden_act: Annotated[str, one_of(*ACT2FN)] = "silu"
    rms_norm_eps: Positive = 1e-6
    num_hidden_layers: PositiveInt = 1
    layer_types: list[Literal["full_attention"]] | None = None
    max_position_embeddings: PositiveInt | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Positive | None = None
    attention_bias: Literal[False] | None = None
    mlp_bias: Literal[False] | None = None
    sliding_window: Any = None
    use_sliding_window: Literal[False] | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.sliding_window is not None and self.use_sliding_window is None:  # switched off, its size has no effect
            problems.append(f"sliding_window {self.sliding_window!r}")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            problems.append(f"layer_types {self.layer_types!r} of {self.num_hidden_layers} layers")
        ropes = [rope for rope in (self.rope_parameters, self.rope_scaling) if rope is not None]
        values = [item for rope in ropes for item in rope.items()]
        problems += [f"rotary embeddings with {name} {value!r}" for name, value in values if not _is_possible(name, value)]
        bases = {base for base in (self.rope_theta, *(rope.get("rope_theta") for rope in ropes)) if base is not None}
        if len(bases) > 1 or (len(ropes) > 1 and _plain(ropes[0]) != _plain(ropes[1])):
            problems.append("rotary embeddings that are given twice, and differ")
        raise_problems(problems)


def _is_possible(name: str, value: Any) -> bool:
    """Check a parameter of rotary embeddings: transformers ignores most that are wrong."""
    if name in ROPE_KINDS or value is None or isinstance(value, bool):
        return name not in ROPE_KINDS or isinstance(value, str)
    return all(isinstance(one, int | float) and 0 < one <= MOST for one in (value if isinstance(value, list) else [value]))


def _plain(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters so that the two ways to write them can be compared."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rope_type": kind, **{name: value for name, value in rope.items() if name not in (*ROPE_KINDS, "rope_theta")}}


Keys = TypeVar("Keys")


def read_keys(keys: type[Keys], config: Mapping[str, Any], folder: Folder) -> Keys:
    """Read the keys of a format from a configuration, in which None stands for a missing key.

    Raises ValueError, with all problems, for unknown keys, and for values that describe no drafter of
    ours.
    """
    known = GENERAL_KEYS - {field.name for field in fields(keys)}  # type: ignore[arg-type]  # a dataclass
    given = {name: value for name, value in config.items() if name not in known and value is not None}
    try:
        return TypeAdapter(keys).validate_json(json.dumps(given))
    except ValidationError as error:
        raise ValueError(
            f"{folder.path / 'config.json'} describes a drafter that isn't supported: {'; '.join(problems_of(error))}"
        ) from None


def describe(config: Any) -> dict[str, Any]:
    """Describe a layer's form, with every option."""
    options = {name: value for name in sorted(FORM_OPTIONS) if (value := getattr(config, name, None)) is not None}
    return {
        "model_type": config.model_type,
        "head_dim": config.hidden_size // config.num_attention_heads,
        **options,
        "rope_parameters": {"rope_type": "default", **(config.rope_parameters or {})},
    }


def layer_problems(layer: Any, target: HFTarget, *, engine: str, allowed: frozenset[str], kinds: tuple[str, ...]) -> list[str]:
    """List the parts of a drafter's layer, and of its target, that `engine` doesn't support.

    It supports the weights LAYER_WEIGHTS and `allowed`, and shares the table of the target's embeddings.
    """
    config, embeddings, problems = layer.self_attn.config, target.embed_tokens, list[str]()
    if type(embeddings).forward is not nn.Embedding.forward:
        problems.append(
            f"the target's {type(embeddings).__name__} computes more than a look-up, but the engines share its table only; "
            "such a target has no format"
        )
    remedy = f"train with 'drafter.layer={{model_type: {kinds[0]}}}'"
    if config.model_type not in kinds:
        return [f"its layer is {config.model_type}'s, but {engine} supports {' or '.join(kinds)}'s only ({remedy})", *problems]
    names = {name for name, _ in layer.named_parameters()} - {*LAYER_WEIGHTS, *allowed}
    if names:
        problems.append(f"its layer has {', '.join(sorted(names))}, which {engine} doesn't support ({remedy})")
    if config.hidden_act != "silu":
        problems.append(f"its layer's activation is {config.hidden_act}, but {engine} supports silu only ({remedy})")
    windows = [kind for kind in (getattr(config, "layer_types", None) or ()) if kind != "full_attention"]
    if windows or (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        problems.append(f"its layer attends to a window of the text only, but {engine} to all of it ({remedy})")
    if any(isinstance(value, dict) for value in (config.rope_parameters or {}).values()):
        problems.append(f"its rotary embeddings differ between kinds of layers, but {engine} has one layer ({remedy})")
    return problems


def order_problems(feature_layers: Sequence[int]) -> list[str]:
    """List the problem that vLLM reads the features of layers in ascending order only."""
    if list(feature_layers) == sorted(feature_layers):
        return []
    remedy = f"train with drafter.feature_layers={sorted(feature_layers)}"
    return [f"it reads the target's layers in the order {list(feature_layers)}, but vLLM in ascending order ({remedy})"]


def raise_unsupported(problems: list[str], name: str) -> None:
    """Raise ValueError if a format doesn't support a drafter, with all problems."""
    if problems:
        raise ValueError(f"the drafter can't be written as {name}: {'; '.join(problems)}")


def write_config(layer: Any, target: HFTarget) -> dict[str, Any]:
    """Describe a drafter's layer with the keys of a Llama of one layer.

    The names are those that transformers 4 and 5 both read.
    """
    form = describe(layer.self_attn.config)
    rope = form.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    return {
        **form,
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 1,
        "max_position_embeddings": target.context_length,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
    }


def read_layers(keys: LayerKeys, folder: Folder, target: HFTarget, *, max_layers: int = 1) -> dict[str, Any] | None:
    """Return the form of the layers that a configuration describes; None for the target's own kind.

    Raises ValueError for the sizes of another target, and for layers that drafters here don't support.
    """
    if keys.num_hidden_layers > max_layers:
        raise ValueError(
            f"{folder.path / 'config.json'} has num_hidden_layers {keys.num_hidden_layers}, and this drafter has at most "
            f"{max_layers}; copy or export the drafter again"
        )
    require_sizes(vars(keys), folder, target)
    model_config = _parse(keys, folder, target)
    described, target_config = describe(model_config), target.model.config.get_text_config()
    lengths = model_config.max_position_embeddings, target_config.max_position_embeddings
    kind = described["rope_parameters"]["rope_type"]
    if kind not in ROPE_OF_POSITIONS and (
        model_config.rope_parameters != target_config.rope_parameters or lengths[0] != lengths[1]
    ):
        raise ValueError(
            f"{folder.path} has rotary embeddings of the kind {kind!r} for a context of {lengths[0]} tokens. They must equal "
            f"the target's, which has a context of {lengths[1]} tokens; use a drafter of this target"
        )
    return None if target_config.model_type in FORMS and described == describe(target_config) else described


def _parse(keys: LayerKeys, folder: Folder, target: HFTarget) -> Any:
    """Build transformers' configuration of the described layer.

    A missing rotary base takes transformers' default. Of unknown parameters of rotary embeddings
    transformers warns.
    """
    make: Any = FORMS[keys.model_type][0]
    others = {"model_type", "num_hidden_layers", "layer_types", "sliding_window", "use_sliding_window"}
    names = {field.name for field in fields(LayerKeys)} - others
    options = {name: value for name in names if (value := getattr(keys, name)) is not None}
    options.setdefault("num_key_value_heads", keys.num_attention_heads)
    try:
        model_config = make(**options, num_hidden_layers=1)
        form_config(target, describe(model_config))
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ValueError(
            f"{folder.path / 'config.json'} doesn't describe a valid layer ({type(error).__name__}: {error}); correct it"
        ) from error
    return model_config


def require_sizes(config: Mapping[str, Any], folder: Folder, target: HFTarget) -> None:
    """Raise ValueError if a drafter has other sizes than the target."""
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "target_hidden_size": target.hidden_size}
    wrong = [
        f"{name} is {config[name]}, the target's {size}"
        for name, size in sizes.items()
        if config.get(name) is not None and config[name] != size
    ]
    if wrong:
        raise ValueError(f"the drafter in {folder.path} doesn't fit {target.identity.name}: {'; '.join(wrong)}")


def target_parts(target: HFTarget, *, head: bool) -> dict[str, torch.Tensor]:
    """Collect the target's tensors that some programs store beside a drafter."""
    parts = {"embed_tokens.weight": target.embed_tokens.weight.detach()}
    if head:
        parts["lm_head.weight"] = target.head.weight.detach()
    return parts


def require_target_parts(tensors: Mapping[str, torch.Tensor], target: HFTarget, *, head: bool, folder: Folder) -> None:
    """Raise ValueError if a stored tensor differs from the target's.

    The drafter would then read other values than in its training.
    """
    for name, target_part in target_parts(target, head=head).items():
        if name not in tensors:
            continue
        stored, expected = tensors[name].float(), target_part.cpu().float()
        if not torch.allclose(stored, expected, rtol=SAME_NUMBER, atol=float(expected.abs().max()) * SAME_NUMBER / 100):
            raise ValueError(
                f"{folder.path} has {name} that differs from the target's, which the drafter would read here; give the "
                f"target that it was trained for ({target.identity.name} may be a fine-tuned copy of it)"
            )


SAME_NUMBER = 2**-7
"""Relative difference that rounding to the narrower of two 16-bit types explains."""
