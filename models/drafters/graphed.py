"""Drafters that are recorded and replayed as CUDA graphs."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int

from ..decoding.protocols import Drafter
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..target.cuda_graphs import GraphedFunction, Recorder


@runtime_checkable
class RecordableDrafter(Drafter[torch.Tensor, None], Protocol):
    """A drafter whose `propose` is `trim(draft(...))`, and whose `draft` can be recorded.

    Its state is one tensor, and its `advance` needs only the accepted path. `draft` depends only on
    its arguments, samples nothing, and returns a tree whose size doesn't depend on their values.
    `trim` may read values, to cut padding.
    """

    def draft(self, state: torch.Tensor, last_token: Int[torch.Tensor, " batch"]) -> DraftTree: ...

    def trim(self, tree: DraftTree) -> DraftTree: ...

    @property
    def tree_sizes(self) -> Sequence[int]:
        """Return all sizes of the trees that `trim` returns."""


class GraphedDrafter:
    """Wrapper that replays a recordable drafter, such as ReDrafter, as a CUDA graph.

    A recording is a function of the state, so states are values as usual. But the next proposal
    overwrites the tree. The drafter's settings must not change.
    """

    def __init__(self, drafter: RecordableDrafter, recorder: Recorder | None = None) -> None:
        self.drafter = drafter
        self.max_nodes, self.feature_layers = drafter.max_nodes, drafter.feature_layers
        self.init_state, self.advance, self.select = drafter.init_state, drafter.advance, drafter.select
        self.meanwhile = drafter.meanwhile
        self._draft = GraphedFunction(drafter.draft, recorder)

    @property
    def tree_sizes(self) -> Sequence[int]:
        return self.drafter.tree_sizes

    def propose(self, state: torch.Tensor, last_token: torch.Tensor, *, generator: Randomness = None) -> tuple[DraftTree, None]:
        return self.drafter.trim(self._draft(state, last_token)), None
