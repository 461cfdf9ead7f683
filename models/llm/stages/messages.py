"""Messages between the head and the stages of a target, and the link that carries them.

    head --work--> stage 1 --work--> ... --work--> stage n --work--> head

Every stage handles the same messages in the same order. It keeps entries of its window, then reads
new ones, and passes the message on with the hidden states behind its layers. A cancelled run passes
through all stages, too, without hidden states: its `keep` counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

HEAD = 0
"""Number of the head's process. Stage k has number k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One pass under way, for a batch of one text.

    The window is the last committed token (entry 0) and the nodes of the draft tree below it (entry
    n + 1 is node n). A message reads the entries from `num_read` on; earlier messages have read the
    others.
    """

    number: int
    """Number of the run. It only rises, also over texts."""
    capacity: int | None = None
    """To begin a text: room in the cache for so many tokens. The stage then reads the prompt into an
    empty cache. None: it keeps entries of the window (unless `keep` is None), then reads new ones."""
    keep: tuple[int, ...] | None = None
    """Entries of the window before this run, in their new order: those that are committed, then those
    that stay in the window. None leaves the window as it is."""
    num_committed: int = 0
    """So many entries of `keep` join the committed text."""
    parents: tuple[int, ...] = ()
    """Parents of all nodes of the window, as node indexes; NO_NODE for children of the root."""
    num_read: int = 0
    """Entries of the window, after `keep`, that earlier runs have read."""
    hidden: Float[Tensor, "1 entry hidden"] | None = None
    """Inputs of the receiver's first layer (of the final norm, at the head) for each token of the
    prompt or each new entry. None if the run was cancelled."""


@runtime_checkable
class Link(Protocol):
    """The head's connection to all of its stages. Messages keep their order."""

    @property
    def num_stages(self) -> int:
        """How many stages there are, without the head."""

    def send(self, work: Work) -> None:
        """Send a message to the first stage, without waiting for it."""

    def has_answer(self) -> bool:
        """Return whether `receive` wouldn't wait."""

    def receive(self) -> Work:
        """Wait for the next message from the last stage, and return it.

        Raises StageLost if a stage has ended or doesn't answer.
        """

    def cancel(self, numbers: Sequence[int]) -> None:
        """Send every stage the numbers of runs that it may skip, without waiting.

        A number may arrive at any time: before its run, while a stage computes it, or afterwards.
        """


class StageLost(ValueError):  # noqa: N818 - the name says what has happened
    """A stage has ended or doesn't answer. The message names the stage, its layers and a remedy."""
