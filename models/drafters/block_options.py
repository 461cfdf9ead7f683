"""Options of a block drafter."""

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, Distinct, NonNegativeInt, PositiveInt, Share, one_of
from .beams import MAX_CANDIDATES, MAX_SEARCH_NODES
from .decoder_layer import check_form
from .eagle3 import default_feature_layers

DEEP_TARGET, NUM_FEATURE_LAYERS = 12, 5
"""Targets of at least DEEP_TARGET layers are read at NUM_FEATURE_LAYERS layers by default."""


@dataclass(kw_only=True, config=OPTIONS)
class BlockConfig:
    """Options of a block drafter: its shape, its training, and how it drafts by default."""

    layer: Annotated[dict[str, Any], AfterValidator(check_form)] | None = None
    """Form of the decoder layers; None is the target's kind. See the same option of EAGLE-3."""
    num_layers: PositiveInt = 1
    """Number of decoder layers. The released drafters of 8B targets have 5."""
    feature_layers: Distinct[NonNegativeInt] | None = None
    """Layers of the target whose inputs the drafter reads. None: five layers evenly spread from
    layer 2 to the last but two, or EAGLE-3's three in targets of fewer than twelve layers."""
    block: PositiveInt = 4
    """Draft tokens on the longest path, all from one pass. Labels must be one token longer."""
    correction: Annotated[str, one_of("none", "markov", "bilinear", "rnn")] = "rnn"
    """How a slot depends on the drafted tokens before it: `rnn` (ReDrafter's recurrence), `markov`
    (DSpark's), `bilinear` (DSpark's gated one), or `none` (DFlash)."""
    rank: PositiveInt = 256
    """Rank of the corrections `markov` and `bilinear`."""
    inject: bool = True
    """Whether slots start with the latest context, a residual path from the target's state to the
    head. Published drafters don't have this path."""
    mask_token_id: NonNegativeInt | None = None
    """Token of the target whose embedding the slots after the first start with, as in published
    drafters. None: each slot has a learned vector."""
    draft_vocab_size: PositiveInt | None = None
    """Size of a reduced draft vocabulary, which has the most frequent tokens of the distilled data;
    its head is trained. None is the whole vocabulary, with the target's own frozen head."""
    init: Annotated[str, one_of("random", "target")] = "target"
    """`target`: each layer starts as the target's last one, but its output projections start at
    zero, so the slots' inputs pass through unchanged. `random`: random weights."""
    loss_decay: Share = 0.8
    """Factor of the loss from each slot to the next."""
    width: PositiveInt = 16
    """Paths that the search keeps at each depth. May be changed when the drafter is loaded."""
    candidates: PositiveInt = 16
    """Candidates of each slot, which the search ranks (not with `rnn`, which ranks all tokens). May
    be changed when the drafter is loaded."""
    tree_nodes: PositiveInt = 48
    """Nodes of the tree: the most probable nodes of the search. May be changed when the drafter is
    loaded."""

    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"width", "candidates", "tree_nodes"})

    def __post_init__(self) -> None:
        num_nodes, breadth = self.width * self.block, max(self.width, self.candidates)
        if num_nodes > MAX_SEARCH_NODES or num_nodes * breadth > MAX_CANDIDATES:
            raise ValueError(
                f"width is {self.width}, candidates {self.candidates} and block {self.block}; a search of more than "
                f"{MAX_SEARCH_NODES} nodes (width x block) or {MAX_CANDIDATES} candidates (width x block x the larger of width "
                "and candidates) is a mistake: lower one of them"
            )


def spread_feature_layers(num_layers: int) -> list[int]:
    """Return the layers that are read by default."""
    if num_layers < DEEP_TARGET:
        return default_feature_layers(num_layers)
    last, steps = num_layers - 3, NUM_FEATURE_LAYERS - 1
    return [round(2 + (last - 2) * step / steps) for step in range(NUM_FEATURE_LAYERS)]
