"""The protocols of the decode loop: target, drafter and acceptance rule.

**A drafter's state is used once.** A drafter object keeps nothing of a text. `init_state` and
`advance` return a state. `propose` returns a tree, and `drafted`: what it computed for the tree.

    state -- propose --> tree, drafted -- advance, by the accepted path --> the next state

A state owns its memory, such as a KV cache, which is too large to copy. `propose`, `advance` and
`select` write to it: never use the state or `drafted` that was an argument again. Pass on the state as
a whole only, never its parts.

Compiled or recorded passes write to memory of a fixed address, and a drafter has one such memory:
the next `init_state` takes it over, and ends all states that came before it.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int

from .growing_tree import GrowingTree
from .sampling import Randomness
from .tree import DraftTree
from .types import Acceptance, AcceptedPath, Prompts, TargetOutput
from .window import DraftRun, PassAnswer

State = TypeVar("State")
"""A drafter's state for a batch of texts."""

Drafted = TypeVar("Drafted")
"""What `propose` computed for a tree, kept until `advance` knows the accepted path."""

Meanwhile = Callable[[float], bool]
"""Work for the time in which a pass waits for weights, called with the seconds that the wait will
still last. Returns whether it did something; if not, nothing fits this wait."""


@runtime_checkable
class Target(Protocol):
    """The frozen large model, with its own KV cache."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether each new shape of a pass is compiled or recorded first.

        If so, batches are padded to few different sizes.
        """

    @property
    def num_prefills(self) -> int:
        """How many batches it has begun. It has one KV cache, so only the last can be continued."""

    def prefill(
        self, prompts: Prompts, *, max_new_tokens: int, max_nodes: int, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Begin a batch: prefill the prompts and reserve room in the KV cache.

        Each row gets room for `max_new_tokens` and for trees of `max_nodes` nodes. All outputs of
        this batch have the `features` of `feature_layers`.

        Raises ValueError if a prompt fills the context window.
        """

    def verify(
        self, last_token: Int[torch.Tensor, " batch"], tree: DraftTree, *, meanwhile: Meanwhile | None = None
    ) -> TargetOutput:
        """Run one forward pass over the last committed token and all nodes.

        Each node attends to its own path only. A target whose weights are streamed calls
        `meanwhile` while it waits for them, on the thread of the pass, until it returns False. A
        target in memory never calls it.
        """

    def commit(self, tree: DraftTree, accepted: AcceptedPath) -> None:
        """Keep each row's last committed token and accepted path in the KV cache; drop the rest."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch.

        `rows` ascend. The last row may be repeated, to fill the batch up.
        """


@runtime_checkable
class AsyncTarget(Target, Protocol):
    """A target that reads several runs at the same time, for one prompt.

    `verify` of such a target submits one run and waits for its answer. `prefill` begins a new text:
    it drops all answers to earlier runs.
    """

    @property
    def max_runs(self) -> int:
        """How many runs may usefully be under way: one more than there are stages."""

    def submit(self, run: DraftRun) -> None:
        """Begin a run. Never waits."""

    def has_answer(self) -> bool:
        """Return whether `receive` would return at once."""

    def receive(self) -> PassAnswer:
        """Return the answer to the oldest unanswered run; waits for it.

        Every run is answered, in the order of `submit`, also if it was cancelled. Raises an error
        if a stage was lost; its message has the stage's layers.
        """

    def cancel(self, numbers: Sequence[int]) -> None:
        """Ask the stages to skip these runs, none of whose entries later runs need.

        A cancellation may come too late, more than once or never: this changes no other answer.
        """


@runtime_checkable
class Drafter(Protocol[State, Drafted]):
    """Proposer of draft trees. Its states are used once: see the module's docstring."""

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """The largest number of nodes of its trees: the target's KV cache keeps room for them."""

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the drafter reads: all outputs then have `features`."""

    @abstractmethod
    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> State:
        """Return the state after the prompts, with room for `max_new_tokens` more in each row."""

    @abstractmethod
    def propose(
        self, state: State, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, Drafted]:
        """Return a tree that hangs from `last_token`, and what `advance` needs of the proposal.

        `last_token` is committed, but the state is that before it. The tree may depend
        on the draws that `generator` shows (see `foreseen`).
        """

    def meanwhile(self, drafted: Drafted) -> Meanwhile | None:
        """Return what to do while the target's pass waits for weights; by default None: nothing.

        It may add to `drafted` what later proposals need, and never changes the tree that is being
        verified.
        """
        return None

    @abstractmethod
    def advance(self, drafted: Drafted, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> State:
        """Return the state after the last token and the accepted path, without the bonus token.

        `tree` is the proposal, and `output` is the target's for it. The next `propose` gets the bonus
        token.
        """

    @abstractmethod
    def select(self, state: State, rows: Sequence[int]) -> State:
        """Return the state of these rows of the batch only.

        `rows` ascend. The last row may be repeated, to fill the batch up.
        """


@runtime_checkable
class StreamingDrafter(Protocol[State]):
    """A drafter whose tree grows while the target reads parts of it, for one prompt."""

    def begin(
        self, prompts: Prompts, prefill: TargetOutput, last_token: int, *, max_new_tokens: int, generator: Randomness = None
    ) -> State:
        """Return the state after a prompt and the first token of its answer. A drafter may foresee the `generator`'s draws."""

    def tree(self, state: State) -> GrowingTree:
        """Return the tree below the last committed token.

        Its probabilities are calibrated; its entries are the drafter's. The next call of `grow` or
        `follow` may change it.
        """

    def grow(self, state: State) -> bool:
        """Run one draft pass, of a few milliseconds at most.

        Returns False if there is nothing more to draft until the next `follow`.
        """

    def follow(self, state: State, tokens: Sequence[int], output: TargetOutput, generator: Randomness = None) -> State:
        """Return the state after the target has committed these tokens.

        They are the accepted draft tokens, then the new last token. `output` is the target's for
        the old last token and for the accepted draft tokens, [1, 1 + accepted, ...]. It may take
        one draft pass.
        """


@runtime_checkable
class AcceptanceRule(Protocol):
    """Decides which path of a tree the target accepts."""

    @property
    def lossless(self) -> bool:
        """Whether the output follows the target's distribution exactly. Printed in every table."""

    @property
    def is_random(self) -> bool:
        """Whether the rule makes random decisions."""

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance: ...
