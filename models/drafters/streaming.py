"""Drafters for a target that reads parts of a draft tree while the tree grows.

The tree of a `StreamingDrafter` is a function of the text and of what the drafter has learned; it
never reads random numbers. So the tokens are those of plain decoding, whenever the target's answers
arrive.
"""

from collections.abc import Sequence
from typing import Any

from ..decoding.growing_tree import GrowingTree
from ..decoding.prompts import Prompts
from ..decoding.protocols import Drafter, StreamingDrafter
from ..decoding.types import TargetOutput
from .block import Block
from .draft_model import DraftModel
from .eagle import Eagle
from .eagle3 import Eagle3
from .medusa import Medusa
from .merged import MergedDrafter
from .null import NullDrafter
from .redrafter import Redrafter
from .streaming_merge import StreamingMerge, StreamingSource
from .streaming_models import StreamingDraftModel, StreamingRedrafter
from .training_free import TrainingFreeDrafter

REASONS: dict[type[Any], str] = {
    Block: "a block drafter reads what enters inner layers of the target, which are in other processes",
    Eagle3: "EAGLE-3 reads what enters inner layers of the target, which are in other processes",
    Eagle: "EAGLE reads the target's hidden states of all accepted tokens, and drafts each tree anew from them",
    Medusa: "Medusa's heads draft a fixed number of tokens from one hidden state, so its tree can't grow",
}
"""Why drafters of some kinds can't be pipelined."""


def streaming_drafter(drafter: Drafter[Any, Any]) -> StreamingDrafter[Any]:
    """Return a drafter's streaming form. It shares the weights, and what the drafter has learned.

    Raises ValueError for a drafter whose tree can't grow while the target reads it.
    """
    if isinstance(drafter, NullDrafter):
        return StreamingNull()
    if isinstance(drafter, MergedDrafter):
        return StreamingMerge([_source(source) for source in drafter.sources.values()], drafter.prior_counts)
    source = _source(drafter)
    return StreamingMerge([source], {}) if isinstance(source, TrainingFreeDrafter) else source


def _source(drafter: Drafter[Any, Any]) -> StreamingSource:
    """Return a drafter as a source of a merge."""
    if isinstance(drafter, TrainingFreeDrafter):
        return drafter
    if isinstance(drafter, DraftModel):
        return StreamingDraftModel(drafter)
    if isinstance(drafter, Redrafter):
        return StreamingRedrafter(drafter)
    reason = next((reason for kind, reason in REASONS.items() if isinstance(drafter, kind)), None)
    reason = reason or f"{type(drafter).__name__} drafts a whole tree at each step, so its tree can't grow"
    raise ValueError(
        f"{reason}: it can't draft while the target reads. Choose a draft model, a ReDrafter, training-free drafters or a "
        "merge of these, or decode step by step"
    )


class StreamingNull(StreamingDrafter[GrowingTree]):
    """Drafter that proposes nothing. Its state is an empty tree."""

    def begin(self, prompts: Prompts, prefill: TargetOutput, last_token: int, *, max_new_tokens: int) -> GrowingTree:
        return GrowingTree()

    def tree(self, state: GrowingTree) -> GrowingTree:
        return state

    def grow(self, state: GrowingTree) -> bool:
        return False

    def follow(self, state: GrowingTree, tokens: Sequence[int], output: TargetOutput) -> GrowingTree:
        return state
