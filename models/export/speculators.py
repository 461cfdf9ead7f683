"""EAGLE-3 in the format of the speculators library, which vLLM loads. DSpark: see `dspark`.

The library is github.com/vllm-project/speculators. The tensors are those of `eagle3` with
`layers.0` in place of `midlayer`. Only a reduced vocabulary has `d2t` and `t2d`. The target's
`embed_tokens.weight` is included, because the library (0.9.0, transformers 5.19) would initialize
it at random otherwise.

`config.json` names the target and the layers whose inputs are read, with vLLM's meaning.
`Eagle3SpeculatorConfig` and `Eagle3DraftModel` (src/speculators/models/eagle3/) read layer and
form; scripts/engines/check_speculators.py checks this.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..drafters.eagle3 import Eagle3
from ..llm.hf_target import HFTarget
from .draft_vocabulary import vocabulary_reading, write_vocabulary
from .eagle3 import NORMS, NUM_FEATURES, eagle3_layer_problems, names_of, read_norms
from .folders import Folder
from .formats import FolderContents, Format, Reading
from .llama import (
    GENERAL_KEYS,
    embedding_problems,
    order_problems,
    raise_unsupported,
    read_config,
    require_readable,
    write_config,
)

FLAGS = ("norm_before_residual", "embed_requires_grad")
"""Keys of variants that drafters here don't have. They are always written, because the library's
and vLLM's defaults differ for the first."""
KEYS = frozenset(
    {
        "auto_map",
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "has_no_defaults_at_init",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "target_hidden_size",
        "transformer_layer_config",
        *FLAGS,
        *NORMS,
    }
)


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
    problems += order_problems(drafter.feature_layers, "vLLM") + embedding_problems(target)
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
        **dict.fromkeys(FLAGS, False),
        **{name: getattr(drafter.config, name) for name in NORMS},
        "transformer_layer_config": write_config(drafter.layer, target),
    }


def read(folder: Folder, target: HFTarget) -> Reading:
    """Describe how to read a folder of the library.

    Raises ValueError for its other algorithms and variants.
    """
    # 1. Check the configuration.
    config, layer = folder.config, folder.config.get("transformer_layer_config")
    problems = [f"an unknown key {name}" for name in sorted(config.keys() - KEYS - GENERAL_KEYS)]
    problems += [f"{name} {config[name]!r}" for name in FLAGS if config.get(name, False) is not False]
    problems += ["no transformer_layer_config"] if not isinstance(layer, dict) else []
    require_readable(folder, problems + proposal_problems(config, "eagle3", target))

    # 2. The drafter's options.
    assert isinstance(layer, dict)
    options: dict[str, Any] = {"layer": read_config(layer, folder, target, more=frozenset({"_attn_implementation"}))}
    options |= read_norms(folder)
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids")
    if layer_ids is not None:
        options["feature_layers"] = layer_ids
    if isinstance(tokens := _speculative_tokens(config), int):
        options["depth"] = tokens
    return vocabulary_reading(
        folder,
        target,
        options=options,
        num_outputs=config.get("draft_vocab_size") or target.vocab_size,
        rename=partial(names_of, "layers.0"),
    )


def _speculative_tokens(config: dict[str, Any]) -> Any:
    """Look up the chain length that the folder proposes, if any."""
    proposed = config.get("speculators_config")
    methods = proposed.get("proposal_methods") if isinstance(proposed, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, dict) else None


def is_of(folder: Folder) -> bool:
    """Check for the library's own key."""
    return "speculators_model_type" in folder.config


FORMAT = Format(name="speculators", kind="eagle3", write=write, read=read, is_of=is_of)


# --- what all algorithms of speculators share in a configuration
#
# Source: `SpeculatorModelConfig` (src/speculators/config.py of github.com/vllm-project/speculators).


VERSION = "0.9.0"
"""Version of the library that the formats were checked against."""
PROPOSED_KEYS = frozenset({"algorithm", "default_proposal_method", "proposal_methods", "verifier"})
"""Known keys of `speculators_config`."""
METHOD_KEYS = frozenset({"accept_tolerance", "proposal_type", "speculative_tokens", "verifier_accept_k"})
VERIFIER_KEYS = frozenset({"architectures", "name_or_path"})


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


def proposal_problems(config: Mapping[str, Any], algorithm: str, target: HFTarget) -> list[str]:
    """List the parts of a configuration that are unknown, of another algorithm or of another target."""
    problems = []
    if config.get("speculators_model_type") != algorithm:
        problems.append(f"speculators_model_type {config.get('speculators_model_type')!r} (only {algorithm} is read)")
    if config.get("target_hidden_size") not in (None, target.hidden_size):
        problems.append(f"target_hidden_size {config['target_hidden_size']} (the target's is {target.hidden_size})")
    proposed = config.get("speculators_config") or {}
    if not isinstance(proposed, dict):
        return [*problems, f"speculators_config {proposed!r}"]
    problems += [f"an unknown key speculators_config.{name}" for name in sorted(proposed.keys() - PROPOSED_KEYS)]
    if proposed.get("algorithm", algorithm) != algorithm:
        problems.append(f"speculators_config.algorithm {proposed['algorithm']!r} (only {algorithm} is read)")
    return problems + _section_problems(proposed)


def _section_problems(proposed: Mapping[str, Any]) -> list[str]:
    methods, verifier = proposed.get("proposal_methods") or [], proposed.get("verifier") or {}
    sections, problems = [("verifier", verifier, VERIFIER_KEYS)], []
    if isinstance(methods, list):
        sections += [(f"proposal_methods[{index}]", method, METHOD_KEYS) for index, method in enumerate(methods)]
    else:
        problems.append(f"speculators_config.proposal_methods {methods!r}")
    for section, value, known in sections:
        if not isinstance(value, dict):
            problems.append(f"speculators_config.{section} {value!r}")
        else:
            problems += [f"an unknown key speculators_config.{section}.{name}" for name in sorted(value.keys() - known)]
    return problems
