"""The block drafter in the two formats of DSpark: DeepSpec's, and that of speculators.

    fc.weight [H, nH], hidden_norm.weight, norm.weight                        the same
    layers.{i}.self_attn.{q,k,v,o}_proj.weight, {q,k}_norm.weight             the same
    layers.{i}.mlp.{gate,up,down}_proj.weight, {input,post_attention}_layernorm.weight
    markov_head.markov_w1.weight [V, r], markov_w2.weight [draft, r]          correction.*
    lm_head.weight [draft, H]; d2t, t2d (see `speculators`)              of a reduced vocabulary only
    embed_tokens.weight, lm_head.weight                                       the target's own, where they are there
    confidence_head.proj.{weight,bias}                                        left out: it changes no draft

DeepSpec (github.com/deepseek-ai/DeepSpec: deepspec/modeling/dspark/qwen3/) describes drafter and
layers in one configuration, and counts the target's layers by their outputs: `target_layer_ids` are
ours less 1. vLLM (vllm/model_executor/models/qwen3_dspark.py), SGLang
(python/sglang/srt/models/dspark.py) and llama.cpp read it. SGLang needs the whole vocabulary.

speculators (src/speculators/models/dspark/, vLLM, llama.cpp) has the layers in a section of their
own, and `aux_hidden_state_layer_ids` are the layers whose inputs are read, as here. The library's
default of `sample_from_anchor` is true and vLLM's false, so the key is always written, and must be
there.

In both, slot k is at the position k after the anchor's, the anchor is y_0 of `Block`, all slots see
each other, and all tokens before the anchor are the context.
"""

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ...data.fields import OPTIONS, NonNegativeInt, PositiveInt
from ..drafters.block import Block
from ..drafters.options import BlockConfig
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

logger = logging.getLogger(__name__)

ARCHITECTURE = "Qwen3DSparkModel"
NORMS = ("input_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight")
"""Weights of a layer besides LAYER_WEIGHTS."""
CONFIDENCE_HEAD = "confidence_head.proj"
NUM_ANCHORS = 512
"""An option of DeepSpec's training, without which its code loads no drafter."""
NESTED = "dflash_config"
"""Section in which SpecForge writes the drafter's keys; vLLM and SGLang read it like top-level keys."""


def ascending(layers: list[int]) -> list[int]:
    """Raise an error for a list that doesn't ascend."""
    if layers != sorted(set(layers)):
        raise PydanticCustomError("ascending", "must be ascending numbers")
    return layers


@dataclass(kw_only=True, config=OPTIONS)
class DsparkKeys:
    """Keys of a `config.json` in both formats."""

    block_size: PositiveInt
    markov_rank: PositiveInt
    mask_token_id: NonNegativeInt
    markov_head_type: Literal["vanilla"] = "vanilla"
    confidence_head_with_markov: bool = False
    enable_confidence_head: bool = False
    draft_vocab_size: PositiveInt | None = None


@dataclass(kw_only=True, config=OPTIONS)
class DeepSpecKeys(DsparkKeys):
    """Keys of a `config.json` of DeepSpec, which also has those of the layers."""

    target_layer_ids: Annotated[list[Annotated[int, Field(ge=-1)]], Field(min_length=1), AfterValidator(ascending)]
    sample_from_anchor: Literal[True] = True
    """The slot of the anchor predicts, too."""
    num_target_layers: int | None = None
    num_anchors: Any = None


@dataclass(kw_only=True, config=OPTIONS)
class DsparkSpeculatorKeys(SpeculatorKeys, DsparkKeys):
    """Keys of a `config.json` of speculators."""

    speculators_model_type: Literal["dspark"]
    aux_hidden_state_layer_ids: Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(ascending)]
    sample_from_anchor: Literal[True]
    """Without this key the library takes true, and vLLM false."""
    sliding_window_non_causal: Any = None


@dataclass(kw_only=True, config=OPTIONS)
class QwenKeys(LayerKeys):
    """Keys of the layers."""

    model_type: Literal["qwen3"] = "qwen3"


def names_of(config: BlockConfig) -> dict[str, str]:
    """Map each tensor that a drafter may have to its name in the formats."""
    layers = [f"layers.{index}.{name}" for index in range(config.num_layers) for name in (*LAYER_WEIGHTS, *NORMS)]
    names = {name: name for name in ("fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", *layers)}
    return names | {f"correction.{name}": f"markov_head.{name}" for name in ("markov_w1.weight", "markov_w2.weight")}


# --- export


def write_deepspec(drafter: Block, target: HFTarget) -> FolderContents:
    """Build the contents of a folder in DeepSpec's format.

    Raises ValueError for a drafter that is no DSpark drafter of the whole vocabulary.
    """
    problems = _problems(drafter, target)
    if drafter.config.draft_vocab_size is not None:
        problems.append(
            "it has a head of its own, but SGLang always uses the target's (train with drafter.draft_vocab_size=null, or "
            f"export it as {SPECULATORS.name}, for vLLM)"
        )
    raise_unsupported(problems, DEEPSPEC.name)
    config = {
        "architectures": [ARCHITECTURE],
        **_layers_config(drafter, target),
        **_shared_config(drafter),
        "num_anchors": NUM_ANCHORS,
        "num_target_layers": len(decoder_layers(target.model)),
        "target_layer_ids": [layer - 1 for layer in drafter.feature_layers],
    }
    return FolderContents(config=config, tensors=_tensors(drafter))


def write_speculators(drafter: Block, target: HFTarget) -> FolderContents:
    """Build the contents of a folder in the format of speculators.

    Raises ValueError for a drafter that is no DSpark drafter.
    """
    problems = _problems(drafter, target)
    if drafter.config.draft_vocab_size == target.vocab_size:
        problems.append(
            "it has a head of its own for the whole vocabulary, but the library uses the target's (train with a smaller "
            "drafter.draft_vocab_size, or null)"
        )
    raise_unsupported(problems, SPECULATORS.name)
    tensors = _tensors(drafter)
    if drafter.config.draft_vocab_size is not None:
        tensors |= write_vocabulary(drafter.vocabulary)
    config = {
        "architectures": ["DSparkSpeculator"],
        **write_proposal("dspark", drafter.config.block, target),
        **_shared_config(drafter),
        "aux_hidden_state_layer_ids": list(drafter.feature_layers),
        "confidence_head_with_markov": False,
        "draft_vocab_size": drafter.vocabulary.num_outputs,
        "sliding_window_non_causal": False,
        "transformer_layer_config": _layers_config(drafter, target),
    }
    return FolderContents(config=config, tensors=tensors)


def _problems(drafter: Block, target: HFTarget) -> list[str]:
    """List what makes a drafter unlike DSpark's."""
    config, layer = drafter.config, drafter.layers[0]
    problems = layer_problems(layer, target, engine="DSpark", allowed=frozenset(NORMS), kinds=("qwen3",))
    problems += order_problems(drafter.feature_layers)
    if config.correction != "markov":
        problems.append(f"its correction is {config.correction}, but DSpark's is markov (train with drafter.correction=markov)")
    if config.inject:
        problems.append("its slots start with the latest context, but DSpark's don't (train with drafter.inject=false)")
    if config.mask_token_id is None:
        problems.append(
            "each of its slots has a learned vector, but DSpark's have a mask token's embedding (train with "
            "drafter.mask_token_id=ID, a token of the target that no text has)"
        )
    if drafter.num_slots < config.block:
        problems.append(
            f"it has {drafter.num_slots} slots for {config.block} draft tokens, but DSpark has one for each (train with "
            "drafter.num_slots=null)"
        )
    return problems


def _tensors(drafter: Block) -> Tensors:
    names = names_of(drafter.config)
    return {names[name]: tensor for name, tensor in drafter.state_dict().items() if name != "draft_tokens"}


def _layers_config(drafter: Block, target: HFTarget) -> dict[str, Any]:
    num_layers = drafter.config.num_layers
    config = write_config(drafter.layers[0], target)
    del config["mlp_bias"]  # Qwen3's layers have none
    return config | {
        "model_type": "qwen3",
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "use_sliding_window": False,
    }


def _shared_config(drafter: Block) -> dict[str, Any]:
    return {
        "block_size": drafter.config.block,
        "enable_confidence_head": False,
        "markov_head_type": "vanilla",
        "markov_rank": drafter.config.rank,
        "mask_token_id": drafter.config.mask_token_id,
        "sample_from_anchor": True,
    }


# --- import


def read_deepspec(folder: Folder, target: HFTarget) -> Reading:
    """Describe how to read a folder of DeepSpec, SpecForge or an engine.

    Raises ValueError for variants of DSpark that drafters here don't support.
    """
    config, known = _without_section(folder), {field.name for field in fields(DeepSpecKeys)}
    keys = read_keys(DeepSpecKeys, {name: value for name, value in config.items() if name in known}, folder)
    num_layers = len(decoder_layers(target.model))
    if keys.num_target_layers not in (None, num_layers):
        raise ValueError(
            f"{folder.path / 'config.json'} has num_target_layers {keys.num_target_layers} (the target's is {num_layers})"
        )
    layers = {name: value for name, value in config.items() if name not in known}
    return _reading(folder, target, keys, layers, [layer + 1 for layer in keys.target_layer_ids])


def read_speculators(folder: Folder, target: HFTarget) -> Reading:
    """Describe how to read a folder of speculators.

    Raises ValueError for its other algorithms, and for variants of DSpark that drafters here don't
    support.
    """
    keys = read_keys(DsparkSpeculatorKeys, folder.config, folder)
    require_sizes(vars(keys), folder, target)
    return _reading(folder, target, keys, keys.transformer_layer_config, keys.aux_hidden_state_layer_ids)


def _without_section(folder: Folder) -> dict[str, Any]:
    """Return the configuration with the keys of NESTED at the top."""
    nested = {} if folder.config.get(NESTED) is None else folder.config[NESTED]
    if not isinstance(nested, dict):
        raise ValueError(f"{folder.path / 'config.json'} has {NESTED} {nested!r}; it must be a section of keys")
    config = {name: value for name, value in folder.config.items() if name != NESTED}
    if differing := sorted(name for name in nested.keys() & config.keys() if nested[name] != config[name]):
        raise ValueError(f"{folder.path / 'config.json'} has two values of {differing[0]}, one in {NESTED}; keep one")
    return config | nested


def _reading(
    folder: Folder, target: HFTarget, keys: DsparkKeys, layers: Mapping[str, Any], feature_layers: list[int]
) -> Reading:
    """Describe how to read a drafter with these keys and these `layers`."""
    layer_keys = read_keys(QwenKeys, layers, folder)
    options = {
        "layer": read_layers(layer_keys, folder, target, max_layers=len(folder.shapes)),
        "num_layers": layer_keys.num_hidden_layers,
        "feature_layers": feature_layers,
        "block": keys.block_size,
        "correction": "markov",
        "rank": keys.markov_rank,
        "mask_token_id": keys.mask_token_id,
        "inject": False,
    }
    reading = vocabulary_reading(
        folder,
        target,
        options=options,
        draft_vocab_size=keys.draft_vocab_size,
        rename=names_of,
        rows=("lm_head.weight", "correction.markov_w2.weight"),
        shares_head=True,
    )
    return _without_confidence_head(reading, folder, keys, target)


def _without_confidence_head(reading: Reading, folder: Folder, keys: DsparkKeys, target: HFTarget) -> Reading:
    """Allow a confidence head, and leave it out with a warning."""
    width = target.hidden_size + (keys.markov_rank if keys.confidence_head_with_markov else 0)
    head = {
        f"{CONFIDENCE_HEAD}.weight": torch.empty(1, width, device="meta"),
        f"{CONFIDENCE_HEAD}.bias": torch.empty(1, device="meta"),
    }

    def convert(tensors: Tensors, options: BlockConfig) -> Tensors:
        if head.keys() & tensors.keys():
            logger.warning(
                "%s has a confidence head, which estimates how many drafts are accepted: it is left out, and the drafts are "
                "the same without it",
                folder.path,
            )
        return reading.convert(tensors, options)

    return replace(reading, open_options=frozenset(), optional=reading.optional | head, convert=convert)


def is_of_deepspec(folder: Folder) -> bool:
    """Check for DSpark's tensors beside a configuration in one piece."""
    names = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"}
    return names <= folder.shapes.keys() and "speculators_model_type" not in folder.config


def is_of_speculators(folder: Folder) -> bool:
    """Check for the key of speculators with DSpark's name."""
    return folder.config.get("speculators_model_type") == "dspark"


DEEPSPEC = Format(name="dspark", kind="block", write=write_deepspec, read=read_deepspec, is_of=is_of_deepspec)
SPECULATORS = Format(
    name="speculators-dspark", kind="block", write=write_speculators, read=read_speculators, is_of=is_of_speculators
)
