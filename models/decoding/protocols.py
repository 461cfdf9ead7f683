"""The seams: what a target, a drafter and an acceptance rule promise to the decode loop.

**A drafter's state is a value.** A drafter keeps nothing of a text in itself. `init_state` and
`advance` return a state, `propose` a tree and what was computed for it:

    state -- propose --> tree, drafted -- advance, by the accepted path --> the next state

Both values stay good whatever happens to others: a state proposes the same tree again and again, and
one `drafted` can be advanced along two different paths, both of which continue as if the other didn't
exist. Only the state itself may be passed on, not what it is made of.

Keys and values of a text are too large to copy at each step, so successive states share one cache, in
which each of them names its own text (`CacheSnapshot`). The newest state writes behind it. A state
that isn't the newest copies its text to a cache of its own first: a fork costs a copy, decoding none.
One limit: memory that compiled or recorded passes write has a fixed address, so there is one. There a
later `init_state` or `select` takes it over, and using an earlier state then raises RuntimeError.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int

from .prompts import Prompts
from .sampling import Randomness
from .tree import DraftTree
from .types import Acceptance, AcceptedPath, TargetOutput

State = TypeVar("State")
"""What a drafter knows of a batch of texts."""

Drafted = TypeVar("Drafted")
"""What a drafter has computed for a tree, until it is known what the target accepts."""


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
        """How often it has begun another batch. There is one KV cache, so only the last batch can be continued."""

    def prefill(
        self, prompts: Prompts, *, max_new_tokens: int, max_nodes: int, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Begin a batch: read the prompts, and reserve room for `max_new_tokens` behind each and trees of `max_nodes`.

        The outputs of the batch have the `features` of these layers.

        Raises ValueError where a prompt fills the context window.
        """

    def verify(self, last_token: Int[torch.Tensor, " batch"], tree: DraftTree) -> TargetOutput:
        """One forward over the last committed token and all nodes, each attending to its own path only."""

    def commit(self, tree: DraftTree, accepted: AcceptedPath) -> None:
        """Keep each row's last committed token and accepted path in the KV cache; forget the other nodes."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch only. They ascend; the last one may be named again, to fill
        the batch up."""


@runtime_checkable
class Drafter(Protocol[State, Drafted]):
    """Proposes draft trees. Its states are values: see the module."""

    @property
    def max_nodes(self) -> int:
        """Most nodes that a tree of its can have: what the target's KV cache keeps room for."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads besides the last hidden states."""

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> State:
        """Return the state behind the prompts, with room for `max_new_tokens` behind each."""

    def propose(
        self, state: State, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, Drafted]:
        """Return a tree that hangs from `last_token`, and what `advance` needs of the proposal."""

    def advance(self, drafted: Drafted, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> State:
        """Return the state behind the accepted path; `output` is the target's for the tree."""

    def select(self, state: State, rows: Sequence[int]) -> State:
        """Return the state of these rows of the batch only. They ascend; the last one may be named
        again, to fill the batch up."""


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
