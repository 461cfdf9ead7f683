"""What all algorithms have in a configuration of the speculators library, which vLLM loads.

The library is github.com/vllm-project/speculators; source: `SpeculatorModelConfig` (src/speculators/config.py).
See `eagle3` and `dspark`.
"""

from dataclasses import field
from typing import Any

from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, PositiveInt
from ..llm.hf_target import HFTarget

VERSION = "0.9.0"
"""Version of the library that the formats were checked against."""


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
