"""EAGLE-3 in the format of the speculators library, which vLLM loads. DSpark: see `dspark`.

The library is github.com/vllm-project/speculators. The tensors are those of `eagle3` with
`layers.0` in place of `midlayer`. Only a reduced vocabulary has `d2t` and `t2d`. The target's
`embed_tokens.weight` is included, because the library (0.9.0, transformers 5.19) would initialize
it at random otherwise.

`config.json` names the target and the layers whose inputs are read, with vLLM's meaning.
`Eagle3SpeculatorConfig` and `Eagle3DraftModel` (src/speculators/models/eagle3/) read layer and
form; scripts/engines/check_speculators.py checks this.
"""

from dataclasses import field
from functools import partial
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, PositiveInt
from ..drafters.eagle3 import Eagle3
from ..llm.hf_target import HFTarget
from .draft_vocabulary import vocabulary_reading, write_vocabulary
from .eagle3 import NORMS, NUM_FEATURES, NormKeys, eagle3_layer_problems, names_of
from .folders import Folder
from .formats import FolderContents, Format, Reading
from .llama import (
    LayerKeys,
    embedding_problems,
    order_problems,
    raise_unsupported,
    read_keys,
    read_layers,
    require_sizes,
    write_config,
)


@dataclass(kw_only=True, config=OPTIONS)
class ProposalKeys:
    """Keys of `speculators_config`. How engines shall draft, and with which target, is their affair."""

    algorithm: str | None = None
    default_proposal_method: Any = None
    proposal_methods: list[dict[str, Any]] | None = None
    verifier: Any = None


@dataclass(kw_only=True, config=OPTIONS)
class SpeculatorKeys:
    """Keys of a `config.json` that all algorithms have."""

    speculators_model_type: str
    transformer_layer_config: dict[str, Any]
    draft_vocab_size: PositiveInt | None = None
    speculators_config: ProposalKeys = field(default_factory=ProposalKeys)
    speculators_version: Any = None
    target_hidden_size: int | None = None

    def __post_init__(self) -> None:
        if self.speculators_config.algorithm not in (None, self.speculators_model_type):
            raise ValueError(
                f"speculators_config.algorithm {self.speculators_config.algorithm!r} of a {self.speculators_model_type}"
            )


@dataclass(kw_only=True, config=OPTIONS)
class Eagle3SpeculatorKeys(SpeculatorKeys, NormKeys):
    """Keys of a `config.json` of EAGLE-3."""

    speculators_model_type: Literal["eagle3"]
    auto_map: Any = None
    eagle_aux_hidden_state_layer_ids: Any = None
    embed_requires_grad: Literal[False] = False
    has_no_defaults_at_init: Any = None
    norm_before_residual: Literal[False] = False


def write(drafter: Eagle3, target: HFTarget) -> FolderContents:
    """Build the contents of the folder.

    Raises ValueError for a drafter with another number of features than vLLM's, or another kind of
    layer.
    """
    problems = eagle3_layer_problems(drafter, "vLLM's EAGLE-3")
    if len(drafter.feature_layers) != NUM_FEATURES:
        problems.append(
            f"it reads {len(drafter.feature_layers)} of the target's layers, but vLLM always provides {NUM_FEATURES} (train "
            f"with {NUM_FEATURES} layers in drafter.feature_layers)"
        )
    problems += order_problems(drafter.feature_layers) + embedding_problems(target)
    raise_unsupported(problems, FORMAT.name)
    names = names_of("layers.0", drafter.config)
    tensors = {names[name]: tensor for name, tensor in drafter.state_dict().items() if name != "draft_tokens"}
    num_outputs = drafter.lm_head.out_features
    if num_outputs != drafter.vocab_size:  # the library has no maps for the whole vocabulary
        tensors |= write_vocabulary(drafter.vocabulary)
    tensors["embed_tokens.weight"] = target.embed_tokens.weight.to(drafter.fc.weight.dtype)
    return FolderContents(config=_config(drafter, target, num_outputs), tensors=tensors)


def _config(drafter: Eagle3, target: HFTarget, num_outputs: int) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        **write_proposal("eagle3", drafter.config.depth, target),
        "draft_vocab_size": num_outputs,
        "eagle_aux_hidden_state_layer_ids": list(drafter.feature_layers),
        # Variants that drafters here don't have; the library's and vLLM's defaults differ for the first.
        **dict.fromkeys(("norm_before_residual", "embed_requires_grad"), False),
        **{name: getattr(drafter.config, name) for name in NORMS},
        "transformer_layer_config": write_config(drafter.layer, target),
    }


def read(folder: Folder, target: HFTarget) -> Reading:
    """Describe how to read a folder of the library.

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


def is_of(folder: Folder) -> bool:
    """Check for the library's own key."""
    return "speculators_model_type" in folder.config


FORMAT = Format(name="speculators", kind="eagle3", write=write, read=read, is_of=is_of)


# --- what all algorithms of speculators share in a configuration
#
# Source: `SpeculatorModelConfig` (src/speculators/config.py of github.com/vllm-project/speculators).


VERSION = "0.9.0"
"""Version of the library that the formats were checked against."""


def write_proposal(algorithm: str, num_tokens: int, target: HFTarget) -> dict[str, Any]:
    """Describe the algorithm, the length of its drafts in tokens, and the target."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target.identity.name, "architectures": [type(target.model).__name__]},
        },
    }
