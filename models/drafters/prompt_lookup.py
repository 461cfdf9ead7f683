"""Prompt lookup: the last tokens of the text, found again earlier in it, and what followed there.

Papers: LLMA (arXiv 2304.04487), which copies from given documents, and prompt lookup decoding
(github.com/apoorvumang/prompt-lookup-decoding; `prompt_lookup_num_tokens` in transformers), which
copies from the prompt and the answer so far. Ours differs from transformers' in three ways. It takes
the latest occurrence, since near text is more alike. A copy that reaches the end of the text
continues with its own first tokens, so a text that repeats itself is drafted at full length. Each
row of a batch has its own text.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, PositiveInt
from .training_free import NO_CANDIDATES, Candidates, NgramIndex, TrainingFreeDrafter, continuation, ngram_keys

PRIOR = ((0.35, 0.6, 0.7), (0.5, 0.7, 0.8), (0.6, 0.75, 0.85))
"""Estimates that a draft token is accepted, by n (1, 2, more) and depth (1, 2, deeper)."""


MAX_NGRAM = 64
"""Longer matches of the last tokens than this decide nothing: a token is indexed for each n."""


@dataclass(kw_only=True, config=OPTIONS)
class PromptLookupConfig:
    """Options of prompt lookup."""

    tree_nodes: PositiveInt = 10
    """Draft tokens: a chain of this length."""
    max_ngram: Annotated[int, Field(ge=1, le=MAX_NGRAM)] = 3
    """Most of the last tokens that are looked up; fewer if these occur nowhere else."""


class PromptLookup(TrainingFreeDrafter):
    """Proposes the tokens that followed the latest occurrence of the text's last tokens.

    The longest n-gram of the last tokens that occurs earlier decides. Without one the tree is empty.
    """

    Config = PromptLookupConfig
    config: PromptLookupConfig

    def new_store(self) -> NgramIndex:
        return NgramIndex(self.config.max_ngram)

    def candidates_of(self, store: NgramIndex, tokens: Sequence[int]) -> Candidates:
        length, max_ngram = self.config.tree_nodes, self.config.max_ngram
        keys = ngram_keys([*store.text[-max_ngram:], *tokens], max_ngram)
        for n in range(len(keys), 0, -1):
            if (position := store.latest.get(keys[n - 1])) is not None:
                return chain(continuation(store.text, position, tokens, length), n)
        return NO_CANDIDATES


def chain(tokens: Sequence[int], n: int) -> Candidates:
    """Return the candidates of a chain after a match of n tokens."""
    row = min(n, len(PRIOR)) - 1
    columns = [min(depth, len(PRIOR[0]) - 1) for depth in range(len(tokens))]
    return Candidates(
        tokens=tokens,
        parents=range(-1, len(tokens) - 1),
        scores=[PRIOR[row][column] for column in columns],
        bins=[row * len(PRIOR[0]) + column for column in columns],
    )
