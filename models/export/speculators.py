"""What the formats of EAGLE-3 and DSpark share: the maps of a reduced vocabulary, and the configuration of speculators.

The library speculators is github.com/vllm-project/speculators, and vLLM loads its folders. Source of the configuration:
`SpeculatorModelConfig` (src/speculators/config.py).
"""

from collections.abc import Callable
from dataclasses import field
from typing import Any

import torch
from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, PositiveInt
from ..drafters.vocabulary import DraftVocabulary
from ..llm.hf_target import HFTarget
from .folders import Folder
from .formats import Reading, Tensors
from .llama import require_target_parts, target_parts

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


# --- maps between the target's tokens and the outputs of a drafter's reduced head
#
# d2t [output] int64: the target's token of output o is o + d2t[o]
# t2d [token] bool: whether the drafter has an output for a token


def write_vocabulary(vocabulary: DraftVocabulary) -> Tensors:
    """Build the maps of a reduced vocabulary. Raises ValueError if its tokens aren't chosen yet."""
    tokens = vocabulary.tokens
    assert tokens is not None
    tokens = tokens.cpu()
    if (tokens < 0).any():
        raise ValueError("the drafter's vocabulary hasn't been chosen, because it is not trained; export it after training")
    drafted = torch.zeros(vocabulary.size, dtype=torch.bool)
    drafted[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": drafted}


def vocabulary_reading(
    folder: Folder,
    target: HFTarget,
    *,
    options: dict[str, Any],
    draft_vocab_size: int | None,
    rename: Callable[[Any], dict[str, str]],
    rows: tuple[str, ...] = ("lm_head.weight",),
    shares_head: bool = False,
) -> Reading:
    """Describe how to read a folder whose head has `draft_vocab_size` outputs; None is the whole vocabulary.

    For the whole vocabulary, the maps may be missing. `rows` are our tensors with a row for
    each output. A drafter that `shares_head` has no head of its own for the whole vocabulary; the
    folder may then have a copy of the target's.
    """
    num_outputs = target.vocab_size if draft_vocab_size is None else draft_vocab_size
    if num_outputs > target.vocab_size:
        raise ValueError(
            f"{folder.path} has draft_vocab_size {num_outputs}; it must be from 1 to the target's {target.vocab_size}"
        )
    tokens, drafted = torch.empty(num_outputs, dtype=torch.long), torch.empty(target.vocab_size, dtype=torch.bool)
    is_whole = num_outputs == target.vocab_size
    maps = {"t2d": drafted.to("meta")} if is_whole else {}
    maps["d2t"] = tokens.to("meta")
    head = shares_head and is_whole

    def convert(tensors: Tensors, config: Any) -> Tensors:
        require_target_parts(tensors, target, head=head, folder=folder)
        stored = {name: tensors[rename(config)[name]] for name in rows} if config.draft_vocab_size is not None else {}
        return _in_order(tensors, stored, num_outputs, folder)

    return Reading(
        options={"init": "random", "draft_vocab_size": None if is_whole else num_outputs, **options},
        rename=rename,
        required_extra={} if is_whole else maps,
        open_options=frozenset({"feature_layers"}),
        optional=target_parts(target, head=head) | (maps if is_whole else {"t2d": drafted.to("meta")}),
        convert=convert,
    )


def _in_order(tensors: Tensors, stored: Tensors, num_outputs: int, folder: Folder) -> Tensors:
    """Sort outputs by their tokens: return the tokens and the sorted rows of `stored`.

    `stored` is empty for the whole vocabulary, which must be in the target's order.
    """
    outputs = torch.arange(num_outputs)
    tokens = outputs + tensors["d2t"].long() if "d2t" in tensors else outputs
    if "t2d" in tensors and tensors["t2d"].nonzero()[:, 0].tolist() != tokens.sort().values.tolist():
        raise ValueError(f"{folder.path} has a d2t and a t2d with different tokens; download or export it again")
    if not stored:
        if not torch.equal(tokens, outputs):
            raise ValueError(f"{folder.path} drafts the whole vocabulary in another order than the target's; export it again")
        return {}
    order = tokens.argsort()
    return {"draft_tokens": tokens[order]} | {name: tensor[order] for name, tensor in stored.items()}
