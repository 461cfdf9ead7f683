"""The seams: what a target, a drafter and an acceptance rule promise to the decode loop.

A drafter's state is a value: it is passed in and handed back, never kept inside, so that it can be forked, dropped, batched and
replayed.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int

from .prompts import Prompts
from .sampling import Randomness
from .tree import DraftTree
from .types import Acceptance, TargetOutput

State = TypeVar("State")


@runtime_checkable
class Target(Protocol):
    """The frozen large model, with its own KV cache."""

    @property
    def context_length(self) -> int:
        """Tokens, prompt and answer together, that the target can hold."""

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether each new shape of a pass is compiled or recorded first, so that few batch sizes
        are worth some padding."""

    @property
    def num_prefills(self) -> int:
        """How often it has started anew. There is one KV cache, so only the last start can go on."""

    def prefill(
        self, prompts: Prompts, *, max_new_tokens: int, max_nodes: int, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Start anew: read the prompts, and keep room for `max_new_tokens` behind each and trees of `max_nodes`.

        From now on outputs have the `features` of these layers.

        Raises ValueError where a prompt fills the context window.
        """

    def verify(self, last_token: Int[torch.Tensor, " batch"], tree: DraftTree) -> TargetOutput:
        """One forward over the last committed token and all nodes, each attending to its own path only."""

    def commit(self, tree: DraftTree, acceptance: Acceptance, num_accepted: Sequence[int]) -> None:
        """Keep each row's last committed token and accepted path in the KV cache; forget the other nodes.

        `num_accepted` is the acceptance's own, as the host knows it.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch only. They ascend; the last one may be named again, to fill
        the batch up."""


@runtime_checkable
class Drafter(Protocol[State]):
    """Proposes draft trees. Trained or not."""

    @property
    def max_nodes(self) -> int:
        """Most nodes that a tree of its can have: what the target's KV cache keeps room for."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads besides the last hidden states."""

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> State:
        """Return the state behind the prompts, with room for `max_new_tokens` behind each."""

    def propose(self, state: State, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None) -> DraftTree: ...

    def advance(
        self, state: State, tree: DraftTree, acceptance: Acceptance, output: TargetOutput, num_accepted: Sequence[int]
    ) -> State:
        """The state after the step. `num_accepted` is the acceptance's own, as the host knows it."""

    def select(self, state: State, rows: Sequence[int]) -> State:
        """The state of these rows of the batch only."""


@runtime_checkable
class SizedDrafter(Protocol):
    """A drafter whose trees come in several sizes."""

    @property
    def tree_sizes(self) -> Sequence[int]:
        """Return all numbers of nodes that its trees have where shapes are recorded."""


@runtime_checkable
class AcceptanceRule(Protocol):
    """Decides which path of a tree the target accepts."""

    @property
    def lossless(self) -> bool:
        """Whether the output's distribution is the target's own. Printed in every table."""

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance: ...
