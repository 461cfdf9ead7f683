"""The part of a configuration of speculators that all of its algorithms share.

Source: `SpeculatorModelConfig` (src/speculators/config.py of github.com/vllm-project/speculators).
"""

from collections.abc import Mapping
from typing import Any

from ..llm.hf_target import HFTarget
from .folders import Folder

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


def raise_problems(folder: Folder, problems: list[str]) -> None:
    """Raise ValueError if a configuration describes no supported drafter, with all problems."""
    if problems:
        raise ValueError(
            f"{folder.path / 'config.json'} describes a drafter that isn't supported: it has {', '.join(problems)}"
        )
