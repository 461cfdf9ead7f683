"""EAGLE-3 in the format of vLLM, SGLang and github.com/SafeAILab/EAGLE, in one file.

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
"""

from functools import partial
from typing import Any

from ..drafters.eagle3 import Eagle3
from ..drafters.options import Eagle3Config
from ..llm.hf_target import HFTarget
from ..llm.hidden_states import decoder_layers
from .draft_vocabulary import vocabulary_reading, write_vocabulary
from .folders import Folder
from .formats import FolderContents, Format, Reading
from .llama import LAYER_WEIGHTS, embedding_problems, layer_problems, raise_unsupported, read_config, write_config

ARCHITECTURE = "LlamaForCausalLMEagle3"
NORMS = ("fc_norm", "norm_before_fc", "norm_output")
"""Keys of the norms that only some drafters have. They are options of ours by the same names."""
KEYS = frozenset(
    {
        "bias",
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "norm_before_residual",
        "target_hidden_size",
        "target_model_type",
        *NORMS,
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


def names_of(prefix: str, config: Eagle3Config) -> dict[str, str]:
    """Map each tensor that a drafter may have to its name in the format; `prefix` is the layer's."""
    layer = {f"layer.{name}": f"{prefix}.{name}" for name in (*LAYER_WEIGHTS, "input_layernorm.weight")}
    num_features = NUM_FEATURES if config.feature_layers is None else len(config.feature_layers)
    norms = ("norm.weight", "input_norm.weight", *(f"fc_norm.{index}.weight" for index in range(num_features)))
    unchanged = {name: name for name in ("fc.weight", "lm_head.weight", *norms)}
    return layer | unchanged | {"hidden_norm.weight": f"{prefix}.hidden_norm.weight"}


def eagle3_layer_problems(drafter: Eagle3, engine: str) -> list[str]:
    """List the parts of the drafter's decoder layer that `engine` doesn't support."""
    return layer_problems(
        drafter.layer, engine=engine, allowed=frozenset({"input_layernorm.weight"}), kinds=("llama", "mistral")
    )


def write(drafter: Eagle3, target: HFTarget) -> FolderContents:
    """Build the contents of a folder for both engines.

    Raises ValueError for a drafter that reads other layers of the target than the default ones, or
    that has another kind of layer.
    """
    # 1. What the engines don't support.
    problems = eagle3_layer_problems(drafter, "the engines' EAGLE-3") + embedding_problems(target)
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
    names = names_of("midlayer", drafter.config)
    tensors = {names[name]: tensor for name, tensor in drafter.state_dict().items() if name != "draft_tokens"}
    if drafter.lm_head.out_features != drafter.vocab_size:  # vLLM doesn't support maps of the whole vocabulary
        tensors |= write_vocabulary(drafter.vocabulary)
    # 3. The configuration.
    config = {
        "architectures": [ARCHITECTURE],
        **write_config(drafter.layer, target),
        "draft_vocab_size": drafter.lm_head.out_features,
        **{name: True for name in NORMS if getattr(drafter.config, name)},
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
        options={"layer": layer, "feature_layers": list(_feature_layers(folder, num_layers)), **read_norms(folder)},
        num_outputs=target.vocab_size if (size := config.get("draft_vocab_size")) is None else size,
        rename=partial(names_of, _prefix(folder) or PREFIXES[0]),
    )


def read_norms(folder: Folder) -> dict[str, bool]:
    """Read the options NORMS. Raises ValueError for values that aren't true or false."""
    norms = {name: folder.config[name] for name in NORMS if folder.config.get(name) is not None}
    if wrong := [name for name, value in norms.items() if type(value) is not bool]:
        raise ValueError(f"{folder.path} has {wrong[0]} {norms[wrong[0]]!r}; it must be true or false")
    return norms


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
