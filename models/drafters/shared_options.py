"""Options that several kinds of drafters share, and the bounds of their searches.

Importing this module loads no torch.
"""

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, PositiveInt, raise_problems

MAX_SEARCH_NODES = 2**14
"""Most nodes of a search: far more than any target gains from, and far less than memory holds."""
MAX_CANDIDATES = 2**18
"""Most candidates that a search may rank, width x width at each depth.

Ten times the candidates of the paper's widest search, which has 70 beams of 5 tokens."""


def search_problems(options: str, num_nodes: int, num_candidates: int = 0) -> list[str]:
    """List the problem that a search has so many nodes, or ranks so many candidates; `options` are those that decide it."""
    if num_nodes <= MAX_SEARCH_NODES and num_candidates <= MAX_CANDIDATES:
        return []
    bounds = f"{MAX_SEARCH_NODES} nodes, or {MAX_CANDIDATES} candidates that are ranked,"
    return [f"{options}: a search of more than {bounds} is a mistake; lower one of them"]


FORM_TYPES = ("llama", "qwen2", "qwen3")
"""Types of the decoder layer that a drafter may have, by the names of transformers' models."""
FORM_OPTIONS = frozenset(
    {
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "hidden_act",
        "rms_norm_eps",
        "attention_bias",
        "mlp_bias",
        "rope_parameters",
    }
)
"""Options of a form besides its `model_type`, by the names of transformers' configurations."""


def check_form(form: dict[str, Any]) -> dict[str, Any]:
    """Return `drafter.layer`. Raises ValueError if it is no known form."""
    if not isinstance(form.get("model_type"), str) or form["model_type"] not in FORM_TYPES:
        raise ValueError(
            f"model_type is {form.get('model_type')!r}; it must be one of {', '.join(FORM_TYPES)}, or drafter.layer "
            "null for a layer of the target's kind"
        )
    if unknown := sorted(form.keys() - FORM_OPTIONS - {"model_type"}):
        raise ValueError(f"there is no option {', '.join(unknown)}; there are: {', '.join(sorted(FORM_OPTIONS))}")
    return form


START_FROM = "start_from"
"""Option of every drafter: see `DrafterChoice`."""


@dataclass(kw_only=True, config=OPTIONS)
class DrafterChoice:
    """The kind of a drafter, and the weights that it starts from."""

    kind: str | None = None
    """The kind of drafter."""
    start_from: str | None = None
    """Folder of a trained drafter, or its name on the Hub, to start training from. The kind, the
    shape and the weights are those of the trained drafter; only drafting options may differ. Its
    target may be another one of the same shape, such as the same model before fine-tuning or
    quantisation."""


@dataclass(kw_only=True, config=OPTIONS)
class TreeOptions:
    """Shape of the draft tree, which loading a drafter may change."""

    depth: PositiveInt = 6
    """Number of draft tokens on the longest path."""
    top_k: PositiveInt = 8
    """Nodes expanded at each depth, and children of each expanded node."""
    tree_nodes: PositiveInt = 48
    """Nodes of the tree: the most probable nodes of the search."""

    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"depth", "top_k", "tree_nodes"})

    def __post_init__(self) -> None:
        raise_problems(search_problems(f"depth is {self.depth} and top_k {self.top_k}", self.depth * self.top_k**2))


@dataclass(kw_only=True, config=OPTIONS)
class LayerOptions(TreeOptions):
    """Form of the decoder layer, and shape of the draft tree."""

    layer: Annotated[dict[str, Any], AfterValidator(check_form)] | None = None
    """Form of the decoder layer; None is the target's kind. A form has a `model_type` (llama, qwen2
    or qwen3), and the options that differ from the target's configuration, under transformers'
    names. Serving engines draft with Llama's layer, whatever the target's layers are."""
