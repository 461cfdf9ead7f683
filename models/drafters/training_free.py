"""The base class of drafters that need no training: they look for the next tokens in the text.

Two known methods are not here. Lookahead decoding (arXiv 2402.02057) guesses tokens by Jacobi
iteration, in a window that each verification computes besides the tree. Token Recycling collects
its n-grams from logits that verification computes anyway. On Spec-Bench (Vicuna-7B, greedy, A100)
lookahead has 1.64 tokens per step and 1.34x, recycling 2.73 and 2.22x.

REST (arXiv 2311.08252) copies from a datastore of many texts by a suffix array. There it has 1.82
tokens per step and 1.48x, and prompt lookup, without a datastore, 1.75 and 1.66x.
"""

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Int

from ..decoding.protocols import Drafter
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree, tree_of
from ..decoding.types import AcceptedPath, Prompts, TargetOutput
from ..llm.hf_target import HFTarget

NOWHERE = -1
TOKEN_BITS = 24
"""More than any vocabulary has."""


class NgramIndex:
    """The positions of every n-gram of a text, for n from 1 to `max_ngram`.

    An n-gram's position is that of its last token. The latest of each n-gram is in a dict;
    `earlier[n - 1][p]` is the position before p of the n-gram that ends at p, or NOWHERE. So a
    token costs one look-up for each n, however long the text is.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.text: list[int] = []
        self.latest: dict[int, int] = {}
        self.earlier = [array("i") for _ in range(max_ngram)]

    def add(self, entry: Sequence[int]) -> None:
        """Append tokens to the text."""
        text, latest = self.text, self.latest
        for token in entry:
            text.append(token)
            for n, key in enumerate(ngram_keys(text, self.max_ngram)):
                self.earlier[n].append(latest.get(key, NOWHERE))
                latest[key] = len(text) - 1
            for n in range(len(text), self.max_ngram):
                self.earlier[n].append(NOWHERE)


def ngram_keys(text: Sequence[int], max_ngram: int) -> list[int]:
    """Return a number for each n-gram at the end of the text, n from 1 to `max_ngram`.

    Different n-grams, also of different n, have different numbers: the tokens are the digits,
    the last token first.
    """
    keys, key = [], 0
    for token in text[: -max_ngram - 1 : -1]:
        key = key << TOKEN_BITS | token + 1  # no digit is 0
        keys.append(key)
    return keys


def continuation(text: Sequence[int], position: int, tokens: Sequence[int], length: int) -> list[int]:
    """Return `length` tokens after `position`, where the last of some tokens occurred before.

    The tokens follow the text. After them the text is taken to repeat what followed `position`:

        a b c d e b + c | d e b c d e ...    b c occurred before, with c at position 2
    """
    period = [*text[position + 1 : position + 1 + length], *tokens]
    return (period * (length // len(period) + 1))[:length]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates for the draft tree of one row, by one drafter: nodes, and how likely they are."""

    tokens: Sequence[int]
    parents: Sequence[int]
    """See `tree.Links`."""
    scores: Sequence[float]
    """The drafter's estimate that a candidate is accepted if its parent is, between 0 and 1."""
    bins: Sequence[int]
    """The drafter's evidence for each candidate, as a number. Candidates of one bin are about as likely
    to be accepted: calibration counts by bin."""


NO_CANDIDATES = Candidates(tokens=(), parents=(), scores=(), bins=())


def each_once(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield rows, each beginning with its text or store, without copies of the last one: they fill a batch up and share it."""
    before = None
    for row in rows:
        if row[0] is not before:
            yield row
        before = row[0]


class FreeState(NamedTuple):
    """The texts of a batch. A proposal passes it on with the last tokens, which its tree follows."""

    stores: tuple[Any, ...]
    """What the drafter keeps about each row's text without the last token. `advance` adds to it: a
    state is used once."""
    last_tokens: Sequence[int] | None = None
    """The last tokens; None if the host hasn't read them yet."""


class TrainingFreeDrafter(Drafter[FreeState, FreeState]):
    """Base class of drafters that need no training.

    The state has a store for each row, on the host. A tree is a function of the text (and of the
    target's logits, which are one too), never of random numbers: so greedy answers are the target's
    own, and seeded samples are those of plain decoding. `advance` takes any tree that follows the
    same tokens, also one that other drafters' candidates were merged into.
    """

    Config: ClassVar[type[Any]]
    """Dataclass of this kind's options, all of which are chosen when it is loaded."""
    config: Any
    feature_layers: ClassVar[tuple[int, ...]] = ()
    context_length: ClassVar[None] = None
    """Most tokens of prompt and answer together: the target's limit suffices."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def for_target(cls, config: Any, target: HFTarget) -> "TrainingFreeDrafter":
        """Return a drafter for this target. Raises ValueError for options that don't fit it."""
        return cls(config)

    @abstractmethod
    def new_store(self) -> Any:
        """Return the store of an empty text. Its method `add` reads an entry."""

    @abstractmethod
    def candidates_of(self, store: Any, tokens: Sequence[int]) -> Candidates:
        """Return at most `config.tree_nodes` candidates after a text and some more tokens.

        The tokens are the text's last one, which isn't in the store, and a path of draft tokens.
        """

    def first_entries(self, prompts: Sequence[list[int]], prefill: TargetOutput) -> Sequence[Any]:
        """Return what the store of each row reads first: by default its prompt."""
        return prompts

    def entries(
        self, last_tokens: Sequence[int], tree: DraftTree, accepted: AcceptedPath, output: TargetOutput
    ) -> Sequence[Any]:
        """Return what the store of each row reads after a step: by default the committed tokens."""
        return [[last_token, *tokens] for last_token, tokens in zip(last_tokens, accepted.tokens, strict=True)]

    @property
    def max_nodes(self) -> int:
        return int(self.config.tree_nodes)

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> FreeState:
        texts = [row[:length] for row, length in zip(prompts.input_ids.tolist(), prompts.lengths, strict=True)]
        stores = tuple(self.new_store() for _ in texts)
        for store, entry in zip(stores, self.first_entries(texts, prefill), strict=True):
            store.add(entry)
        return FreeState(stores)

    def candidates(self, state: FreeState, last_tokens: Sequence[int]) -> list[Candidates]:
        """Return the candidates of each row, after its last token."""
        return [self.candidates_of(store, [token]) for store, token in zip(state.stores, last_tokens, strict=True)]

    def propose(
        self, state: FreeState, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, FreeState]:
        last_tokens = last_token.tolist() if state.last_tokens is None else state.last_tokens
        links = [(found.tokens, found.parents) for found in self.candidates(state, last_tokens)]
        return tree_of(links, last_token.device), FreeState(state.stores, last_tokens)

    def advance(self, drafted: FreeState, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> FreeState:
        assert drafted.last_tokens is not None, "propose has read the last tokens"
        entries = self.entries(drafted.last_tokens, tree, accepted, output)
        for store, entry in each_once(zip(drafted.stores, entries, strict=True)):
            store.add(entry)
        return FreeState(drafted.stores, accepted.next_tokens)

    def select(self, state: FreeState, rows: Sequence[int]) -> FreeState:
        last_tokens = state.last_tokens
        return FreeState(tuple(state.stores[row] for row in rows), last_tokens and tuple(last_tokens[row] for row in rows))
