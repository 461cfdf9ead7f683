"""Options of a block drafter."""

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, Distinct, NonNegativeInt, PositiveInt, Share, one_of, raise_problems
from .beams import MAX_CANDIDATES, MAX_SEARCH_NODES
from .decoder_layer import check_form
from .eagle3 import default_feature_layers

DEEP_TARGET, NUM_FEATURE_LAYERS = 12, 5
"""Targets of at least DEEP_TARGET layers are read at NUM_FEATURE_LAYERS layers by default."""
MAX_RANK = 2**13
MAX_PAIRS = 2**22
"""Most pairs of candidates in neighbouring slots: 16 MiB of logits for each row of a batch."""


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
    """Draft tokens on the longest path, all from one pass."""
    num_slots: PositiveInt | None = None
    """Slots that the layers read. None: one for each draft token. With fewer, the last slot's output
    also serves the draft tokens after it, which then differ by the correction only. With one slot,
    all draft tokens share its output, as ReDrafter's share the target's state. Labels must be at
    least one token longer than the slots."""
    correction: Annotated[str, one_of("none", "markov", "bilinear", "rnn")] = "rnn"
    """How a slot depends on the drafted tokens before it: `rnn` (ReDrafter's recurrence), `markov`
    (DSpark's), `bilinear` (the same with a factor of the slot's output), or `none` (DFlash)."""
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
    its head is trained. None is the whole vocabulary."""
    train_head: bool = False
    """Whether the head of the whole vocabulary is trained too, as a copy of the target's (with `init:
    target`). Off, it is the target's own, frozen, and adds no parameters."""
    init: Annotated[str, one_of("random", "target")] = "target"
    """`target`: each layer starts as the target's last one, but its output projections start at
    zero, so the slots' inputs pass through unchanged. `random`: random weights."""
    loss_decay: Share = 0.8
    """Factor of the loss from each slot to the next."""
    depth: PositiveInt | None = None
    """Draft tokens on the longest path of a tree; None: `block`. With the correction `rnn` it may be
    larger: the last slot's output then serves the tokens after it, too. May be changed when the
    drafter is loaded."""
    width: PositiveInt = 16
    """Paths that the search keeps at each depth. May be changed when the drafter is loaded."""
    candidates: PositiveInt = 128
    """Candidates of each slot, which the search ranks (not with `rnn`, which ranks all tokens). With
    few, tokens that the correction would choose are missing. May be changed when the drafter is
    loaded."""
    tree_nodes: PositiveInt = 48
    """Nodes of the tree: the most probable nodes of the search. May be changed when the drafter is
    loaded."""

    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"depth", "width", "candidates", "tree_nodes"})

    @property
    def search_depth(self) -> int:
        """Draft tokens on the longest path of a tree."""
        return self.depth or self.block

    def __post_init__(self) -> None:
        problems = []
        if self.search_depth > self.block and self.correction != "rnn":
            problems.append(
                f"depth is {self.depth}, more than the {self.block} draft tokens of block, and correction {self.correction}; "
                "lower depth, or choose the correction rnn"
            )
        if self.num_slots is not None and self.num_slots > self.block:
            problems.append(f"num_slots is {self.num_slots}, more than the {self.block} draft tokens of block; lower num_slots")
        if (self.num_slots or self.block) < self.block and self.correction == "none":
            problems.append(
                f"num_slots is {self.num_slots} and correction none, so all draft tokens from {self.num_slots} on would be "
                "predicted alike; choose a correction, or set num_slots to null"
            )
        is_ranked = self.correction != "rnn"
        num_nodes, breadth = self.width * self.search_depth, max(self.width, self.candidates if is_ranked else 0)
        depth = f"block {self.block}" if self.depth is None else f"depth {self.depth}"
        if num_nodes > MAX_SEARCH_NODES or num_nodes * breadth > MAX_CANDIDATES:
            problems.append(
                f"width is {self.width}{f', candidates {self.candidates}' if is_ranked else ''} and {depth}; a search of more "
                f"than {MAX_SEARCH_NODES} nodes (width x depth) or {MAX_CANDIDATES} candidates (width x depth x "
                f"{'the larger of width and candidates' if is_ranked else 'width'}) is a mistake: lower one of them"
            )
        if self.rank > MAX_RANK:
            problems.append(f"rank is {self.rank}; a correction of rank above {MAX_RANK} is a mistake: lower it")
        num_pairs = (self.block - 1) * self.candidates**2
        if is_ranked and num_pairs > MAX_PAIRS:
            problems.append(
                f"candidates is {self.candidates} and block {self.block}; more than {MAX_PAIRS} pairs of candidates "
                "((block - 1) x candidates x candidates) don't fit in memory: lower one of them"
            )
        raise_problems(problems)


def spread_feature_layers(num_layers: int) -> list[int]:
    """Return the layers that are read by default."""
    if num_layers < DEEP_TARGET:
        return default_feature_layers(num_layers)
    last, steps = num_layers - 3, NUM_FEATURE_LAYERS - 1
    return [round(2 + (last - 2) * step / steps) for step in range(NUM_FEATURE_LAYERS)]
