"""EAGLE-3 as vLLM, SGLang and github.com/SafeAILab/EAGLE have it, in one file.

    fc.weight [H, 3H]                                                        fc.weight
    midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight   layer.input_layernorm, hidden_norm, layer.*
    midlayer.self_attn.{q,k,v}_proj.weight [., 2H], o_proj.weight            layer.self_attn.*
    midlayer.mlp.{gate,up,down}_proj.weight                                  layer.mlp.*
    norm.weight, lm_head.weight [draft, H]                                   the same
    d2t [draft] int64: token of output o is o + d2t[o]; t2d [V] bool         draft_tokens, of a reduced vocabulary only
    embed_tokens.weight                                                      the target's own, where it is there

The names are those of vllm/model_executor/models/llama_eagle3.py and
python/sglang/srt/models/llama_eagle3.py. Both read the inputs of the target's layers 2, n // 2 and
n - 3 unless told otherwise, and are told in two ways that mean different layers (SGLang adds 1 to
what it is told, vLLM doesn't): so a drafter of other layers goes through `speculators`.
"""

from typing import Any

import torch

from ..drafters.eagle3 import Eagle3, Eagle3Config
from ..target.hf_target import HFTarget
from ..target.hidden_states import decoder_layers
from .folders import Folder
from .formats import FolderContents, Format, Reading, Tensors
from .llama import LAYER_WEIGHTS, layer_problems, raise_refusal, read_config, require_target_parts, target_parts, write_config

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
"""Keys of `eagle_config` whose other values would make another drafter: NVIDIA's Model Optimizer
writes them."""
NESTED_KEYS = frozenset(
    {"eagle_aux_hidden_state_layer_ids", "parallel_draft_heads_num_layers", "use_aux_hidden_state", *NESTED_MUST_BE}
)
"""Of `eagle_config`."""
PREFIXES = ("midlayer", "layers.0")
"""How names of the layer's tensors begin: the release's and SpecForge's, and the Model Optimizer's.
Both engines read both."""
NUM_FEATURES = 3


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers that the engines read where the file doesn't say."""
    return (2, num_layers // 2, num_layers - 3)


def names_of(prefix: str) -> dict[str, str]:
    """Their name of each of our tensors, the layer's beginning with `prefix`."""
    layer = {f"layer.{name}": f"{prefix}.{name}" for name in (*LAYER_WEIGHTS, "input_layernorm.weight")}
    own = {name: name for name in ("fc.weight", "norm.weight", "lm_head.weight")}
    return layer | own | {"hidden_norm.weight": f"{prefix}.hidden_norm.weight"}


def write_vocabulary(drafter: Eagle3) -> Tensors:
    """Return the maps between the target's tokens and the outputs of a reduced head."""
    outputs, tokens = torch.arange(drafter.lm_head.out_features), drafter.vocabulary.tokens
    assert tokens is not None
    tokens = tokens.cpu()
    if (tokens < 0).any():
        raise ValueError("the drafter's vocabulary hasn't been chosen yet: it is not trained; export it after training")
    drafted = torch.zeros(drafter.vocab_size, dtype=torch.bool)
    drafted[tokens] = True
    return {"d2t": tokens - outputs, "t2d": drafted}


def layer_refusals(drafter: Eagle3, place: str) -> list[str]:
    """Return what of the drafter's decoder layer `place` has no room for."""
    return layer_problems(drafter, place=place, allowed=frozenset({"input_layernorm.weight"}), kinds=("llama", "mistral"))


def write(drafter: Eagle3, target: HFTarget) -> FolderContents:
    """Return one file for both engines.

    Raises ValueError for other layers of the target than the usual, or another kind of layer.
    """
    problems = layer_refusals(drafter, "the engines' EAGLE-3")
    usual = usual_layers(len(decoder_layers(target.model)))
    if drafter.feature_layers != usual:
        is_deep = list(usual) == sorted(set(usual)) and usual[0] >= 0
        remedy = f"export it as speculators, for vLLM, or train with drafter.feature_layers={list(usual)}"
        problems.append(
            f"it reads the inputs of the target's layers {list(drafter.feature_layers)}, and the two engines agree on "
            f"{list(usual)} only ({remedy if is_deep else 'this target has too few layers for that'})"
        )
    raise_refusal(problems, FORMAT.name)
    names = names_of("midlayer")
    tensors = {names[name]: tensor for name, tensor in drafter.state_dict().items() if name != "draft_tokens"}
    if drafter.lm_head.out_features != drafter.vocab_size:  # vLLM has no place for maps of the whole vocabulary
        tensors |= write_vocabulary(drafter)
    config = {
        "architectures": [ARCHITECTURE],
        **write_config(drafter, target),
        "draft_vocab_size": drafter.lm_head.out_features,
    }
    return FolderContents(config=config, tensors=tensors)


def read(folder: Folder, target: HFTarget) -> Reading:
    """Return the drafter of a folder with EAGLE-3's weights, of the engines or of the release."""
    config = folder.config
    for key, right in (("norm_before_residual", False), ("bias", False)):
        if config.get(key, right) != right:
            raise ValueError(f"{folder.path} has {key} {config[key]!r}, which no drafter here can have")
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
    """Return the reading of a folder whose head has `num_outputs`.

    Where that is the whole vocabulary, the maps may be missing.
    """
    if type(num_outputs) is not int or not 0 < num_outputs <= target.vocab_size:
        raise ValueError(
            f"{folder.path} has draft_vocab_size {num_outputs!r}; it must be 1 to the target's {target.vocab_size}"
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
    """Return the tokens of the head's outputs, in order, and the head's rows in that order."""
    outputs = torch.arange(num_outputs)
    tokens = outputs + tensors["d2t"].long() if "d2t" in tensors else outputs
    if "t2d" in tensors and tensors["t2d"].nonzero()[:, 0].tolist() != tokens.sort().values.tolist():
        raise ValueError(f"{folder.path} has d2t and t2d that name different tokens; download or export it again")
    if config.draft_vocab_size is None:
        if not torch.equal(tokens, outputs):
            raise ValueError(f"{folder.path} drafts the whole vocabulary in another order than the target's; export it again")
        return {}
    order = tokens.argsort()
    return {"draft_tokens": tokens[order], "lm_head.weight": tensors["lm_head.weight"][order]}


def _feature_layers(folder: Folder, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs are read.

    Raises ValueError where the file's numbers mean different layers to the engines.
    """
    config = folder.config
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict) or nested.keys() - NESTED_KEYS:
        raise ValueError(f"{folder.path} has eagle_config {nested!r}, which no drafter here can have")
    if strange := [name for name, right in NESTED_MUST_BE.items() if nested.get(name) not in right]:
        raise ValueError(f"{folder.path} has {strange[0]} {nested[strange[0]]!r}, which no drafter here can have")
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    usual = usual_layers(num_layers)
    if layer_ids is not None and not (isinstance(layer_ids, list) and all(type(layer) is int for layer in layer_ids)):
        raise ValueError(f"{folder.path} names the layers {layer_ids!r}; they must be a list of numbers")
    if not nested.get("use_aux_hidden_state", True):
        raise ValueError(f"{folder.path} reads the target's last hidden state only, which is none of EAGLE-3's drafters here")
    if layer_ids is None or tuple(layer_ids) in (usual, tuple(layer - 1 for layer in usual)):
        return usual  # in vLLM's numbers, or in SGLang's, which are one less
    raise ValueError(
        f"{folder.path} names the layers {layer_ids}: vLLM reads the inputs of these, SGLang those of the layers after them; "
        "say which with the option feature_layers, in vLLM's way, and take the key out of its config.json"
    )


def _prefix(folder: Folder) -> str | None:
    return next((prefix for prefix in PREFIXES if f"{prefix}.hidden_norm.weight" in folder.shapes), None)


def is_of(folder: Folder) -> bool:
    """Told by the norm that its layer alone has."""
    return _prefix(folder) is not None


FORMAT = Format(name="eagle3", kind="eagle3", write=write, read=read, is_of=is_of)
