"""Stores that grow in place, although the states that read them are values.

An index of a text is too large to copy at each step. So successive states of a row share one
journal: all entries so far, and the store that they built. The state of the whole journal adds to
it. A state of fewer entries first builds a journal of its own entries: a fork costs a new store,
decoding costs none.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Store(Protocol):
    """What a drafter keeps about the text of a row: a function of the entries that were added."""

    def add(self, entry: Any) -> None: ...


class Journal:
    """Entries in order, and the store that they built."""

    def __init__(self, make_store: Callable[[], Store], entries: Sequence[Any]) -> None:
        self.make_store = make_store
        self.store: Any = make_store()
        self.entries: list[Any] = []
        for entry in entries:
            self.add(entry)

    def add(self, entry: Any) -> None:
        self.entries.append(entry)
        self.store.add(entry)


class Snapshot:
    """The first `length` entries of a journal. A value: later entries don't change it."""

    __slots__ = ("journal", "length")

    def __init__(self, journal: Journal, length: int) -> None:
        self.journal, self.length = journal, length

    @property
    def store(self) -> Any:
        """The store of exactly these entries. Only `after` may add to it."""
        journal = self.journal
        if len(journal.entries) > self.length:  # a later state has added to it
            journal = self.journal = Journal(journal.make_store, journal.entries[: self.length])
        return journal.store

    def after(self, entry: Any) -> "Snapshot":
        """Return the snapshot with one more entry."""
        _ = self.store
        self.journal.add(entry)
        return Snapshot(self.journal, self.length + 1)
