"""EAGLE-3 in the format of vLLM, SGLang and github.com/SafeAILab/EAGLE, in one file.

    fc.weight [H, 3H]                                                        fc.weight
    midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight   layer.input_layernorm, hidden_norm, layer.*
    midlayer.self_attn.{q,k,v}_proj.weight [., 2H], o_proj.weight            layer.self_attn.*
    midlayer.mlp.{gate,up,down}_proj.weight                                  layer.mlp.*
    norm.weight, lm_head.weight [draft, H]                                   the same
    d2t [draft] int64: token of output o is o + d2t[o]; t2d [V] bool         draft_tokens, of a reduced vocabulary only
    embed_tokens.weight                                                      the target's own, where it is there

The names are those of vllm/model_executor/models/llama_eagle3.py and
python/sglang/srt/models/llama_eagle3.py. By default both read the inputs of the target's layers 2,
n // 2 and n - 3. The key for other layers has different meanings in the two engines: SGLang adds 1
to its numbers, vLLM doesn't. So a drafter of other layers is exported as `speculators`.
"""

from typing import Any

import torch

from ..drafters.eagle3 import Eagle3, Eagle3Config
from ..target.hf_target import HFTarget
from ..target.hidden_states import decoder_layers
from .folders import Folder
from .formats import FolderContents, Format, Reading, Tensors
from .llama import (
    LAYER_WEIGHTS,
    layer_problems,
    raise_unsupported,
    read_config,
    require_target_parts,
    target_parts,
    write_config,
)

ARCHITECTURE = "LlamaForCausalLMEagle3"
KEYS = frozenset(
    {
        "bias",
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "norm_before_residual",
        "target_hidden_size",
        "target_model_type",
    }
)
NESTED_MUST_BE: dict[str, tuple[Any, ...]] = {
    "next_layer_regular": (None, True),
    "parallel_draft_step": (None, 1),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
}
"""Keys of `eagle_config`, written by NVIDIA's Model Optimizer, with the values that we support.
Other values describe a different drafter."""
NESTED_KEYS = frozenset(
    {"eagle_aux_hidden_state_layer_ids", "parallel_draft_heads_num_layers", "use_aux_hidden_state", *NESTED_MUST_BE}
)
"""Known keys of `eagle_config`."""
PREFIXES = ("midlayer", "layers.0")
"""Prefixes of the layer's tensors: `midlayer` in the release and in SpecForge, `layers.0` in the
Model Optimizer. Both engines read both."""
NUM_FEATURES = 3


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Compute the layers that the engines read by default."""
    return (2, num_layers // 2, num_layers - 3)


def names_of(prefix: str) -> dict[str, str]:
    """Map each of our tensors to its name in the format; `prefix` is the layer's."""
    layer = {f"layer.{name}": f"{prefix}.{name}" for name in (*LAYER_WEIGHTS, "input_layernorm.weight")}
    unchanged = {name: name for name in ("fc.weight", "norm.weight", "lm_head.weight")}
    return layer | unchanged | {"hidden_norm.weight": f"{prefix}.hidden_norm.weight"}


def write_vocabulary(drafter: Eagle3) -> Tensors:
    """Build the maps between the target's tokens and the outputs of a reduced head."""
    outputs, tokens = torch.arange(drafter.lm_head.out_features), drafter.vocabulary.tokens
    assert tokens is not None
    tokens = tokens.cpu()
    if (tokens < 0).any():
        raise ValueError("the drafter's vocabulary hasn't been chosen, because it is not trained; export it after training")
    drafted = torch.zeros(drafter.vocab_size, dtype=torch.bool)
    drafted[tokens] = True
    return {"d2t": tokens - outputs, "t2d": drafted}


def eagle3_layer_problems(drafter: Eagle3, engine: str) -> list[str]:
    """List the parts of the drafter's decoder layer that `engine` doesn't support."""
    return layer_problems(drafter, engine=engine, allowed=frozenset({"input_layernorm.weight"}), kinds=("llama", "mistral"))


def write(drafter: Eagle3, target: HFTarget) -> FolderContents:
    """Build the contents of a folder for both engines.

    Raises ValueError for a drafter that reads other layers of the target than the default ones, or
    that has another kind of layer.
    """
    # 1. What the engines don't support.
    problems = eagle3_layer_problems(drafter, "the engines' EAGLE-3")
    usual = usual_layers(len(decoder_layers(target.model)))
    if drafter.feature_layers != usual:
        is_deep = list(usual) == sorted(set(usual)) and usual[0] >= 0
        remedy = f"export it as speculators, for vLLM, or train with drafter.feature_layers={list(usual)}"
        problems.append(
            f"it reads the inputs of the target's layers {list(drafter.feature_layers)}, but vLLM and SGLang agree on "
            f"{list(usual)} only ({remedy if is_deep else 'this target has too few layers for that'})"
        )
    raise_unsupported(problems, FORMAT.name)
    # 2. The tensors under the engines' names.
    names = names_of("midlayer")
    tensors = {names[name]: tensor for name, tensor in drafter.state_dict().items() if name != "draft_tokens"}
    if drafter.lm_head.out_features != drafter.vocab_size:  # vLLM doesn't support maps of the whole vocabulary
        tensors |= write_vocabulary(drafter)
    # 3. The configuration.
    config = {
        "architectures": [ARCHITECTURE],
        **write_config(drafter, target),
        "draft_vocab_size": drafter.lm_head.out_features,
    }
    return FolderContents(config=config, tensors=tensors)


def read(folder: Folder, target: HFTarget) -> Reading:
    """Describe how to read a folder with EAGLE-3's weights, from an engine or the release."""
    config = folder.config
    for key, right in (("norm_before_residual", False), ("bias", False)):
        if config.get(key, right) != right:
            raise ValueError(
                f"{folder.path} has {key} {config[key]!r}, which drafters here don't support; only {right!r} is read"
            )
    layer = read_config({**config, "model_type": "llama"}, folder, target, more=KEYS)
    num_layers = len(decoder_layers(target.model))
    return vocabulary_reading(
        folder,
        target,
        options={"layer": layer, "feature_layers": list(_feature_layers(folder, num_layers))},
        num_outputs=config.get("draft_vocab_size") or target.vocab_size,
        prefix=_prefix(folder) or PREFIXES[0],
    )


def vocabulary_reading(folder: Folder, target: HFTarget, *, options: dict[str, Any], num_outputs: Any, prefix: str) -> Reading:
    """Describe how to read a folder whose head has `num_outputs` outputs.

    If that is the whole vocabulary, the maps may be missing.
    """
    if type(num_outputs) is not int or not 0 < num_outputs <= target.vocab_size:
        raise ValueError(
            f"{folder.path} has draft_vocab_size {num_outputs!r}; it must be from 1 to the target's {target.vocab_size}"
        )
    tokens, drafted = torch.empty(num_outputs, dtype=torch.long), torch.empty(target.vocab_size, dtype=torch.bool)
    is_whole = num_outputs == target.vocab_size
    maps = {"t2d": drafted.to("meta")} if is_whole else {}
    maps["d2t"] = tokens.to("meta")

    def convert(tensors: Tensors, config: Eagle3Config) -> Tensors:
        require_target_parts(tensors, target, head=False, folder=folder)
        return _read_vocabulary(tensors, config, num_outputs, folder)

    return Reading(
        options={"init": "random", "draft_vocab_size": None if is_whole else num_outputs, **options},
        rename=lambda config: names_of(prefix),
        required_extra={} if is_whole else maps,
        open_options=frozenset({"feature_layers"}),
        optional=target_parts(target, head=False) | (maps if is_whole else {"t2d": drafted.to("meta")}),
        convert=convert,
    )


def _read_vocabulary(tensors: Tensors, config: Eagle3Config, num_outputs: int, folder: Folder) -> Tensors:
    """Compute the tokens of the head's outputs in ascending order, and the head's rows in that
    order."""
    outputs = torch.arange(num_outputs)
    tokens = outputs + tensors["d2t"].long() if "d2t" in tensors else outputs
    if "t2d" in tensors and tensors["t2d"].nonzero()[:, 0].tolist() != tokens.sort().values.tolist():
        raise ValueError(f"{folder.path} has a d2t and a t2d with different tokens; download or export it again")
    if config.draft_vocab_size is None:
        if not torch.equal(tokens, outputs):
            raise ValueError(f"{folder.path} drafts the whole vocabulary in another order than the target's; export it again")
        return {}
    order = tokens.argsort()
    return {"draft_tokens": tokens[order], "lm_head.weight": tensors["lm_head.weight"][order]}


def _feature_layers(folder: Folder, num_layers: int) -> tuple[int, ...]:
    """Determine the layers whose inputs the drafter reads.

    Raises ValueError if vLLM and SGLang would read different layers for the folder's numbers.
    """
    config = folder.config
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict) or nested.keys() - NESTED_KEYS:
        raise ValueError(f"{folder.path} has eagle_config {nested!r}, which drafters here don't support")
    if unsupported := [name for name, right in NESTED_MUST_BE.items() if nested.get(name) not in right]:
        raise ValueError(f"{folder.path} has {unsupported[0]} {nested[unsupported[0]]!r}, which drafters here don't support")
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    usual = usual_layers(num_layers)
    if layer_ids is not None and not (isinstance(layer_ids, list) and all(type(layer) is int for layer in layer_ids)):
        raise ValueError(f"{folder.path} names the layers {layer_ids!r}; they must be a list of numbers")
    if not nested.get("use_aux_hidden_state", True):
        raise ValueError(f"{folder.path} reads the target's last hidden state only, which EAGLE-3 drafters here don't support")
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


FORMAT = Format(name="eagle3", kind="eagle3", write=write, read=read, is_of=is_of)
