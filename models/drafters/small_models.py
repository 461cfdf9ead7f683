"""Where the weights of an independent draft model come from: the target's family made smaller, or a model that is there."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...data.fields import OPTIONS, PositiveInt, one_of, raise_problems
from ...data.hub import use_hub
from ..target.config import TargetConfig
from ..target.hf_target import HFTarget
from ..target.identity import weights_digest
from ..target.loading import load_target
from ..target.plain_weights import require_plain_weights, whole
from .beams import MAX_SEARCH_NODES

NOT_ARCHITECTURE = ("_name_or_path", "architectures", "auto_map", "dtype", "quantization_config", "transformers_version")
"""Keys of a configuration that say where a model came from and in which form, not what it computes."""

PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Keys whose value lists all layers."""


@dataclass(kw_only=True, config=OPTIONS)
class DraftModelConfig:
    """Which model drafts, and how it drafts by default."""

    path: str | None = None
    """Directory or Hub id of a model to fine-tune, with safetensors weights and the target's own tokenizer and vocabulary size.
    None: a model of the target's family, of the sizes below."""
    tokenizer_options: dict[str, Any] = field(default_factory=dict)
    """For the tokenizer at `path`: those of the target's configuration."""
    init: Annotated[str, one_of("random", "target_layers")] = "random"
    """`random`, or `target_layers`: the target's first layers with its embeddings, norm and head, so none of its sizes but
    `num_layers` may be another."""
    num_layers: PositiveInt = 2
    """Decoder layers; at most the target's."""
    hidden_size: PositiveInt | None = None
    """Width; None is the target's own."""
    intermediate_size: PositiveInt | None = None
    """Width of the MLPs; None keeps the target's proportion to the width."""
    num_heads: PositiveInt | None = None
    """Attention heads; None keeps the target's proportion to the width."""
    num_kv_heads: PositiveInt | None = None
    """Heads of keys and values; None keeps the size of the target's groups."""
    architecture: dict[str, Any] | None = None
    """transformers' configuration of the model, written when a drafter is saved: what its weights belong to. It replaces the
    options above."""

    length: PositiveInt = 4
    """Draft tokens on the longest path. This and what follows may be changed when the drafter is loaded."""
    top_k: PositiveInt = 1
    """Nodes expanded at each depth; 1 makes a chain."""
    tree_nodes: PositiveInt | None = None
    """Nodes of the tree: so many of the likeliest that the search met; None is all of them."""
    temperature: NonNegativeFloat = 0.0
    """Above 0, draft tokens are drawn at this temperature, best the target's own. Trees are not drawn: `top_k` must be 1."""

    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"length", "top_k", "tree_nodes", "temperature"})

    def __post_init__(self) -> None:
        problems = []
        sizes = [name for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads") if getattr(self, name)]
        if self.init == "target_layers" and sizes:
            problems.append(f"init is target_layers, whose {', '.join(sizes)} can't be chosen; leave that out, or set random")
        if self.temperature > 0 and self.top_k > 1:
            problems.append(
                f"temperature is {self.temperature} and top_k {self.top_k}; what is drawn is a chain: set one of them to 0 or "
                "1. A tree that isn't drawn serves every temperature of the target"
            )
        if self.length * self.top_k**2 > MAX_SEARCH_NODES:
            problems.append(
                f"length is {self.length} and top_k {self.top_k}; a search of more than {MAX_SEARCH_NODES} nodes is a mistake: "
                "lower one of them"
            )
        raise_problems(problems)


CANT_BE_BUILT = (
    *(StrictDataclassError, TypeError, ValueError),  # values of wrong types, or that contradict each other
    KeyError,  # names that transformers doesn't know
    *(ArithmeticError, AssertionError, RuntimeError),  # sizes that no tensor can have
)
"""What transformers' classes and torch's modules raise for a configuration of which no model can be built."""


def architecture_of(model: PreTrainedModel) -> dict[str, Any]:
    """What `build_model` makes such a model of: JSON values."""
    return _shape(model.config)


def build_model(architecture: dict[str, Any], target: HFTarget) -> PreTrainedModel:
    """A model with random weights, in float32. Raises ValueError where transformers knows no such model."""
    try:
        config: Any = AutoConfig.for_model(**architecture)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=target.model.config._attn_implementation,
            trust_remote_code=False,
        )
    except CANT_BE_BUILT as error:
        raise ValueError(f"transformers can't make the draft model ({error}); its configuration is {architecture}") from error
    return model


def smaller_architecture(config: DraftModelConfig, target: HFTarget) -> dict[str, Any]:
    """The target's own configuration, with the sizes of `config`."""
    own = target.model.config.get_text_config()
    if config.num_layers > own.num_hidden_layers:
        raise ValueError(f"drafter.num_layers is {config.num_layers}; the target has only {own.num_hidden_layers}")
    heads, hidden = own.num_attention_heads, config.hidden_size or own.hidden_size
    num_heads = config.num_heads or max(1, heads * hidden // own.hidden_size)
    num_kv_heads = config.num_kv_heads or max(1, num_heads * (getattr(own, "num_key_value_heads", None) or heads) // heads)
    if hidden % num_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"a draft model {hidden} wide with {num_heads} heads, {num_kv_heads} of them for keys and values, can't be made; "
            "set drafter.hidden_size, num_heads and num_kv_heads so that each is a multiple of the next"
        )
    sizes = {"hidden_size": hidden, "num_hidden_layers": config.num_layers, "num_attention_heads": num_heads}
    if hasattr(own, "num_key_value_heads"):
        sizes["num_key_value_heads"] = num_kv_heads
    if hasattr(own, "intermediate_size"):
        sizes["intermediate_size"] = config.intermediate_size or own.intermediate_size * hidden // own.hidden_size
    if config.num_heads is not None and getattr(own, "head_dim", None) is not None:
        sizes["head_dim"] = hidden // num_heads
    for option, name in (("num_kv_heads", "num_key_value_heads"), ("intermediate_size", "intermediate_size")):
        if getattr(config, option) is not None and name not in sizes:
            raise ValueError(f"drafter.{option} is {getattr(config, option)}, and {type(own).__name__} has no {name}")
    shape = _shape(own)
    for name in PER_LAYER:
        if isinstance(shape.get(name), list):
            shape[name] = shape[name][: config.num_layers]
    # Some families have names of their own for these.
    return shape | {own.attribute_map.get(name, name): size for name, size in sizes.items()}


def _shape(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_diff_dict().items() if key not in NOT_ARCHITECTURE}


@torch.no_grad()
def first_layers(model: PreTrainedModel, target: HFTarget) -> None:
    """Give a model, the target cut short, the target's own weights."""
    require_plain_weights(target.model, "set drafter.init=random")
    weights, theirs = model.state_dict(), target.model.state_dict()
    if missing := sorted(weights.keys() - theirs.keys()):
        raise ValueError(f"the target has no {missing[0]}, so the draft model can't begin with its layers; set init=random")
    for name, weight in weights.items():
        weight.copy_(whole(theirs[name]))


def weights_digest_at(path: str) -> str:
    """Digest of an existing model's weights, not read into memory. Raises ValueError where there is none."""
    if not Path(path).is_dir():
        use_hub()
    try:
        return weights_digest(path, getattr(AutoConfig.from_pretrained(path), "_commit_hash", None))
    except (OSError, ValueError) as error:
        raise ValueError(f"drafter.path is {path}, and no model is there: {error}") from error


def pretrained(path: str, tokenizer_options: dict[str, Any], target: HFTarget) -> HFTarget:
    """An existing model, in float32. Raises ValueError where it can't be loaded, isn't safe to, or reads other tokens."""
    config = TargetConfig(
        name_or_path=path,
        dtype="float32",
        attn_implementation=target.model.config._attn_implementation,
        device=str(target.device),
        tokenizer_options=tokenizer_options,
        compiled=target.compiled,
        cuda_graphs=target.cuda_graphs,
    )
    try:
        loaded = load_target(config, safetensors_only=True)
    except ValueError as error:
        raise ValueError(f"drafter.path is {path}: {error}") from error
    require_same_tokenizer(loaded.identity.name, loaded.identity.tokenizer_sha256, target)
    loaded.model.train().requires_grad_(True)
    return loaded


def require_same_tokenizer(name: str, digest: str, target: HFTarget) -> None:
    """Raise ValueError where the draft model `name` has a tokenizer of another `digest` than the target's."""
    if digest != target.identity.tokenizer_sha256:
        raise ValueError(
            f"the draft model {name} has another tokenizer than {target.identity.name}, so its token ids mean something else; "
            "use a smaller model of the same family"
        )
