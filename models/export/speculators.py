"""EAGLE-3 in the format of the speculators library, which vLLM loads.

The library is github.com/vllm-project/speculators. The tensors are those of `eagle3` with
`layers.0` in place of `midlayer`. Only a reduced vocabulary has `d2t` and `t2d`. The target's
`embed_tokens.weight` is included, because the library (0.9.0, transformers 5.19) would initialize
it at random otherwise.

`config.json` names the target and the layers whose inputs are read, with vLLM's meaning.
`Eagle3SpeculatorConfig` and `Eagle3DraftModel` (src/speculators/models/eagle3/) read layer and
form; scripts/engines/check_speculators.py checks this.
"""

from typing import Any

from ..drafters.eagle3 import Eagle3
from ..target.hf_target import HFTarget
from .eagle3 import NUM_FEATURES, eagle3_layer_problems, names_of, vocabulary_reading, write_vocabulary
from .folders import Folder
from .formats import FolderContents, Format, Reading
from .llama import GENERAL_KEYS, raise_unsupported, read_config, write_config

VERSION = "0.9.0"
"""Version of the library that the format was checked against."""
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
"""Keys of EAGLE-3's variants. They are always written, because the library's and vLLM's defaults
differ for the first."""
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
    }
)


PROPOSED_KEYS = frozenset({"algorithm", "default_proposal_method", "proposal_methods", "verifier"})
"""Known keys of `speculators_config`."""
METHOD_KEYS = frozenset({"accept_tolerance", "proposal_type", "speculative_tokens", "verifier_accept_k"})
VERIFIER_KEYS = frozenset({"architectures", "name_or_path"})


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
    raise_unsupported(problems, FORMAT.name)
    names = names_of("layers.0")
    tensors = {names[name]: tensor for name, tensor in drafter.state_dict().items() if name != "draft_tokens"}
    num_outputs = drafter.lm_head.out_features
    if num_outputs != drafter.vocab_size:  # the library has no maps for the whole vocabulary
        tensors |= write_vocabulary(drafter)
    tensors["embed_tokens.weight"] = target.embed_tokens.weight.to(drafter.fc.weight.dtype)
    return FolderContents(config=_config(drafter, target, num_outputs), tensors=tensors)


def _config(drafter: Eagle3, target: HFTarget, num_outputs: int) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafter.config.depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": target.identity.name, "architectures": [type(target.model).__name__]}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "draft_vocab_size": num_outputs,
        "eagle_aux_hidden_state_layer_ids": list(drafter.feature_layers),
        **dict.fromkeys(FLAGS, False),
        "transformer_layer_config": write_config(drafter, target),
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
    if config.get("speculators_model_type") != "eagle3":
        problems.append(f"speculators_model_type {config.get('speculators_model_type')!r} (only eagle3 is read)")
    if config.get("target_hidden_size") not in (None, target.hidden_size):
        problems.append(f"target_hidden_size {config['target_hidden_size']} (the target's is {target.hidden_size})")
    proposed = config.get("speculators_config") or {}
    if not isinstance(proposed, dict):
        problems.append(f"speculators_config {proposed!r}")
    else:
        problems += _proposal_problems(proposed)
    if problems:
        raise ValueError(
            f"{folder.path / 'config.json'} describes a drafter that isn't supported: it has {', '.join(problems)}"
        )

    # 2. The drafter's options.
    assert isinstance(layer, dict)
    options: dict[str, Any] = {"layer": read_config(layer, folder, target, more=frozenset({"_attn_implementation"}))}
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
        prefix="layers.0",
    )


def _proposal_problems(proposed: dict[str, Any]) -> list[str]:
    """List the parts of `speculators_config` that are unknown or of another algorithm."""
    problems = [f"an unknown key speculators_config.{name}" for name in sorted(proposed.keys() - PROPOSED_KEYS)]
    if proposed.get("algorithm", "eagle3") != "eagle3":
        problems.append(f"speculators_config.algorithm {proposed['algorithm']!r} (only eagle3 is read)")
    methods, verifier = proposed.get("proposal_methods") or [], proposed.get("verifier") or {}
    sections = [("verifier", verifier, VERIFIER_KEYS)]
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
