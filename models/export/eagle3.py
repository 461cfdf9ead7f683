"""EAGLE-3 in two formats: that of vLLM, SGLang and github.com/SafeAILab/EAGLE, and that of speculators.

    fc.weight [H, 3H]                                                        fc.weight
    midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight   layer.input_layernorm, hidden_norm, layer.*
    midlayer.self_attn.{q,k,v}_proj.weight [., 2H], o_proj.weight            layer.self_attn.*
    midlayer.mlp.{gate,up,down}_proj.weight                                  layer.mlp.*
    norm.weight, lm_head.weight [draft, H]                                   the same
    fc_norm.{0,1,2}.weight [H], input_norm.weight [3H]                       the same, where there are such norms
    d2t [draft] int64: token of output o is o + d2t[o]; t2d [V] bool         draft_tokens, of a reduced vocabulary only
    embed_tokens.weight                                                      the target's own, where it is there

The names are those of vllm/model_executor/models/llama_eagle3.py and
python/sglang/srt/models/llama_eagle3.py. By default both read the inputs of the target's layers 2,
n // 2 and n - 3. The key for other layers has different meanings in the two engines: SGLang adds 1
to its numbers, vLLM doesn't. So a drafter of other layers is exported as `speculators`.

In the format of speculators (see `speculators`), which vLLM loads, the names are the same with `layers.0` in place of
`midlayer`. Only a reduced vocabulary has `d2t` and `t2d`. The target's `embed_tokens.weight` is included, because the
library (0.9.0, transformers 5.19) would initialize it at random otherwise. `config.json` names the target and the
layers whose inputs are read, with vLLM's meaning. `Eagle3SpeculatorConfig` and `Eagle3DraftModel`
(src/speculators/models/eagle3/) read layer and form; scripts/engines/check_speculators.py checks this.
"""

from dataclasses import field
from functools import partial
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, PositiveInt
from ..drafters.eagle3 import Eagle3
from ..drafters.options import Eagle3Config
from ..llm.hf_target import HFTarget
from ..llm.hidden_states import decoder_layers
from .folders import Folder
from .formats import FolderContents, Format, Reading, Tensors
from .llama import (
    LAYER_WEIGHTS,
    LayerKeys,
    layer_problems,
    order_problems,
    raise_unsupported,
    read_keys,
    read_layers,
    require_sizes,
    write_config,
)
from .speculators import SpeculatorKeys, vocabulary_reading, write_proposal, write_vocabulary

ARCHITECTURE = "LlamaForCausalLMEagle3"
NORMS = ("fc_norm", "norm_before_fc", "norm_output")
PREFIXES = ("midlayer", "layers.0")
"""Prefixes of the layer's tensors: `midlayer` in the release and in SpecForge, `layers.0` in the
Model Optimizer. Both engines read both."""
NUM_FEATURES = 3


@dataclass(kw_only=True, config=OPTIONS)
class OptimizerKeys:
    """Keys of `eagle_config`, written by NVIDIA's Model Optimizer. Other values describe a different drafter."""

    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    next_layer_regular: Literal[True, None] = None
    parallel_draft_heads_num_layers: Any = None
    parallel_draft_step: Literal[1, None] = None
    use_aux_hidden_state: Literal[True, None] = None
    use_input_layernorm_in_first_layer: Literal[True, None] = None
    use_last_layernorm: Literal[True, None] = None
    use_mtp_layernorm: Literal[False, None] = None


@dataclass(kw_only=True, config=OPTIONS)
class NormKeys:
    """Keys of the norms that only some drafters have. They are options of ours by the same names."""

    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False

    def options(self) -> dict[str, bool]:
        """Return the drafter's options."""
        return {name: getattr(self, name) for name in NORMS}


@dataclass(kw_only=True, config=OPTIONS)
class Eagle3Keys(LayerKeys, NormKeys):
    """Keys of a `config.json`."""

    bias: Literal[False] = False
    draft_vocab_size: PositiveInt | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    eagle_config: OptimizerKeys = field(default_factory=OptimizerKeys)
    norm_before_residual: Literal[False] = False
    target_hidden_size: int | None = None
    target_model_type: Any = None


@dataclass(kw_only=True, config=OPTIONS)
class Eagle3SpeculatorKeys(SpeculatorKeys, NormKeys):
    """Keys of a `config.json` of speculators."""

    speculators_model_type: Literal["eagle3"]
    auto_map: Any = None
    eagle_aux_hidden_state_layer_ids: Any = None
    embed_requires_grad: Literal[False] = False
    has_no_defaults_at_init: Any = None
    norm_before_residual: Literal[False] = False


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Compute the layers that the engines read by default."""
    return (2, num_layers // 2, num_layers - 3)


def names_of(prefix: str, config: Eagle3Config) -> dict[str, str]:
    """Map each tensor that a drafter may have to its name in the format; `prefix` is the layer's."""
    layer = {f"layer.{name}": f"{prefix}.{name}" for name in (*LAYER_WEIGHTS, "input_layernorm.weight")}
    num_features = NUM_FEATURES if config.feature_layers is None else len(config.feature_layers)
    norms = ("norm.weight", "input_norm.weight", *(f"fc_norm.{index}.weight" for index in range(num_features)))
    unchanged = {name: name for name in ("fc.weight", "lm_head.weight", *norms)}
    return layer | unchanged | {"hidden_norm.weight": f"{prefix}.hidden_norm.weight"}


# --- export


def _problems(drafter: Eagle3, target: HFTarget, engine: str) -> list[str]:
    """List the parts of the drafter's decoder layer, and of the target, that `engine` doesn't support."""
    allowed = frozenset({"input_layernorm.weight"})
    return layer_problems(drafter.layer, target, engine=engine, allowed=allowed, kinds=("llama", "mistral"))


def _tensors(drafter: Eagle3, prefix: str) -> Tensors:
    """Return the tensors under the format's names, with the maps of a reduced vocabulary: readers know none of the whole."""
    names = names_of(prefix, drafter.config)
    tensors = {names[name]: tensor for name, tensor in drafter.state_dict().items() if name != "draft_tokens"}
    return tensors if drafter.lm_head.out_features == drafter.vocab_size else tensors | write_vocabulary(drafter.vocabulary)


def write(drafter: Eagle3, target: HFTarget) -> FolderContents:
    """Build the contents of a folder for both engines.

    Raises ValueError for a drafter that reads other layers of the target than the default ones, or
    that has another kind of layer.
    """
    # 1. What the engines don't support.
    problems = _problems(drafter, target, "the engines' EAGLE-3")
    usual = usual_layers(len(decoder_layers(target.model)))
    if drafter.feature_layers != usual:
        is_deep = list(usual) == sorted(set(usual))
        remedy = f"export it as speculators, for vLLM, or train with drafter.feature_layers={list(usual)}"
        problems.append(
            f"it reads the inputs of the target's layers {list(drafter.feature_layers)}, but vLLM and SGLang agree on "
            f"{list(usual)} only ({remedy if is_deep else 'this target has too few layers for that'})"
        )
    raise_unsupported(problems, FORMAT.name)
    # 2. The configuration.
    config = {
        "architectures": [ARCHITECTURE],
        **write_config(drafter.layer, target),
        "draft_vocab_size": drafter.lm_head.out_features,
        **{name: True for name in NORMS if getattr(drafter.config, name)},
    }
    return FolderContents(config=config, tensors=_tensors(drafter, "midlayer"))


def write_speculators(drafter: Eagle3, target: HFTarget) -> FolderContents:
    """Build the contents of a folder of speculators.

    Raises ValueError for a drafter with another number of features than vLLM's, or another kind of
    layer.
    """
    problems = _problems(drafter, target, "vLLM's EAGLE-3") + order_problems(drafter.feature_layers)
    if len(drafter.feature_layers) != NUM_FEATURES:
        problems.append(
            f"it reads {len(drafter.feature_layers)} of the target's layers, but vLLM always provides {NUM_FEATURES} (train "
            f"with {NUM_FEATURES} layers in drafter.feature_layers)"
        )
    raise_unsupported(problems, SPECULATORS.name)
    config = {
        "architectures": ["Eagle3Speculator"],
        **write_proposal("eagle3", drafter.config.depth, target),
        "draft_vocab_size": drafter.lm_head.out_features,
        "eagle_aux_hidden_state_layer_ids": list(drafter.feature_layers),
        # Variants that drafters here don't have; the library's and vLLM's defaults differ for the first.
        **dict.fromkeys(("norm_before_residual", "embed_requires_grad"), False),
        **{name: getattr(drafter.config, name) for name in NORMS},
        "transformer_layer_config": write_config(drafter.layer, target),
    }
    embeddings = target.embed_tokens.weight.to(drafter.fc.weight.dtype)
    return FolderContents(config=config, tensors=_tensors(drafter, "layers.0") | {"embed_tokens.weight": embeddings})


# --- import


def read(folder: Folder, target: HFTarget) -> Reading:
    """Describe how to read a folder with EAGLE-3's weights, from an engine or the release."""
    keys = read_keys(Eagle3Keys, {**folder.config, "model_type": "llama"}, folder)
    layers = list(_feature_layers(keys, folder, len(decoder_layers(target.model))))
    return vocabulary_reading(
        folder,
        target,
        options={"layer": read_layers(keys, folder, target), "feature_layers": layers, **keys.options()},
        draft_vocab_size=keys.draft_vocab_size,
        rename=partial(names_of, _prefix(folder) or PREFIXES[0]),
    )


def _feature_layers(keys: Eagle3Keys, folder: Folder, num_layers: int) -> tuple[int, ...]:
    """Determine the layers whose inputs the drafter reads.

    Raises ValueError if vLLM and SGLang would read different layers for the folder's numbers.
    """
    layer_ids = keys.eagle_aux_hidden_state_layer_ids or keys.eagle_config.eagle_aux_hidden_state_layer_ids
    usual = usual_layers(num_layers)
    if layer_ids is None or tuple(layer_ids) in (usual, tuple(layer - 1 for layer in usual)):
        return usual  # in vLLM's numbers, or in SGLang's, which are one less
    raise ValueError(
        f"{folder.path} names the layers {layer_ids}: vLLM reads the inputs of these layers, SGLang those of the next layers; "
        "set the option feature_layers with vLLM's meaning, and delete the key from its config.json"
    )


def _prefix(folder: Folder) -> str | None:
    return next((prefix for prefix in PREFIXES if f"{prefix}.hidden_norm.weight" in folder.shapes), None)


def is_of(folder: Folder) -> bool:
    """Check for the norm that only EAGLE-3's layer has."""
    return _prefix(folder) is not None


def read_speculators(folder: Folder, target: HFTarget) -> Reading:
    """Describe how to read a folder of speculators.

    Raises ValueError for its other algorithms and variants.
    """
    keys = read_keys(Eagle3SpeculatorKeys, folder.config, folder)
    layers = read_keys(LayerKeys, keys.transformer_layer_config, folder)
    require_sizes(vars(keys), folder, target)
    options: dict[str, Any] = {"layer": read_layers(layers, folder, target), **keys.options()}
    if keys.eagle_aux_hidden_state_layer_ids is not None:
        options["feature_layers"] = keys.eagle_aux_hidden_state_layer_ids
    methods = keys.speculators_config.proposal_methods
    if methods and (depth := methods[0].get("speculative_tokens")) is not None:
        options["depth"] = depth
    return vocabulary_reading(
        folder, target, options=options, draft_vocab_size=keys.draft_vocab_size, rename=partial(names_of, "layers.0")
    )


def is_of_speculators(folder: Folder) -> bool:
    """Check for the library's own key."""
    return "speculators_model_type" in folder.config


FORMAT = Format(name="eagle3", kind="eagle3", write=write, read=read, is_of=is_of)
SPECULATORS = Format(name="speculators", kind="eagle3", write=write_speculators, read=read_speculators, is_of=is_of_speculators)
