"""What each step of an answer drafted, and why its draft ended, for `outrider explain`.

The answers that are decoded once more for their phases are decoded another time for this, outside of
all clocks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from ...models.decoding.loop import generate
from ...models.decoding.protocols import AcceptanceRule, Drafter, Target
from ...models.decoding.sampling import Randomness, RowSeeds
from ...models.decoding.tree import DraftTree
from ...models.decoding.types import Acceptance, TargetOutput
from ...models.drafters.base import TrainableDrafter
from ...models.drafters.beams import SearchTree
from ...models.drafters.graphed import GraphedDrafter
from ...models.drafters.merged import MergedDrafter
from ..records.records import ENDED, FULL, IN_REACH, MISSED, NO_DRAFT, OUTSIDE, Drafts

Part = TrainableDrafter | GraphedDrafter
"""A trained drafter, alone or in a merge, which may be recorded there."""
PROBABILITY_DIGITS = 3
CONTEXT = 4
"""Tokens before a token with which it is decoded."""


class Watched:
    """An acceptance rule that keeps its last decision."""

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule, self.lossless, self.is_random = rule, rule.lossless, rule.is_random

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance:
        self.tree, self.output = tree, output
        self.acceptance = self.rule(tree, output, generator=generator)
        return self.acceptance


def trace_drafts(
    target: Target,
    drafter: Drafter[Any, Any],
    rule: AcceptanceRule,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Int[torch.Tensor, " _"]],
    *,
    seeds: Sequence[int],
    **options: Any,
) -> list[Drafts]:
    """Decode a batch, and return each row's steps.

    A recorded drafter drafts without its recording, which has no search to look into. A model that grows one tree in a
    merge has no search either: what its tree lacks counts as missed.
    """
    drafter = drafter.drafter if isinstance(drafter, GraphedDrafter) else drafter
    sources = drafter.merge.sources if isinstance(drafter, MergedDrafter) else [drafter]
    parts = [source for source in sources if isinstance(source, TrainableDrafter | GraphedDrafter)]
    watched = Watched(rule)
    answers, accepted = [list[int]() for _ in prompts], [list[int]() for _ in prompts]
    ends, probabilities = ["" for _ in prompts], [list[float]() for _ in prompts]
    with _searches_of(parts) as searches:
        for step in generate(target, drafter, watched, prompts, generator=RowSeeds(seeds), **options):
            for index, row in enumerate(step.rows):
                answers[row] += step.tokens[index]
                if step.is_prefill:
                    continue
                entry, token = int(watched.acceptance.entry[index]), int(watched.acceptance.bonus_token[index])
                path = watched.acceptance.path[index, : step.num_accepted[index]]
                drafts = watched.tree.tokens[index, path].tolist()
                is_last = step.finishes[index] is not None
                ends[row] += ENDED if is_last else why(searches, parts, index, watched.tree, drafts, token)
                probs = watched.output.logits[index, entry].float().softmax(-1)
                accepted[row].append(len(drafts))
                probabilities[row].append(round(float(probs[token]), PROBABILITY_DIGITS))
            searches.clear()
    return [
        Drafts(
            prompt_ids=prompts[row].tolist(),
            accepted=accepted[row],
            ends=ends[row],
            probabilities=probabilities[row],
            texts=texts_of(answers[row], tokenizer),
        )
        for row in range(len(prompts))
    ]


def texts_of(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each token, after the few before it: some tokenizers drop the space of a first token."""
    texts = []
    for place in range(len(token_ids)):
        start = max(0, place - CONTEXT)
        before, whole, alone = (
            str(tokenizer.decode(token_ids[first:end]))
            for first, end in ((start, place), (start, place + 1), (place, place + 1))
        )
        texts.append(whole[len(before) :] if whole.startswith(before) else alone)
    return texts


def why(
    searches: dict[int, SearchTree],
    parts: Sequence[Part],
    row: int,
    tree: DraftTree,
    drafts: Sequence[int],
    token: int,
) -> str:
    """Return why a row's draft ended before a token that the target chose after these draft tokens."""
    if not tree.num_nodes or not (tree.tokens[row] >= 0).any() or (parts and not searches):
        return NO_DRAFT
    found = [search_ends(search, row, drafts, token) for search in searches.values()]
    if IN_REACH in found:
        return IN_REACH
    if FULL in found:
        return FULL
    wanted = torch.tensor([token], device=tree.tokens.device)
    plain: list[TrainableDrafter] = [part.drafter if isinstance(part, GraphedDrafter) else part for part in parts]
    is_inside = [bool(drafter.vocabulary.outputs(wanted)[1]) for drafter in plain]
    return OUTSIDE if is_inside and not any(is_inside) else MISSED


def search_ends(search: SearchTree, row: int, drafts: Sequence[int], token: int) -> str:
    """Follow draft tokens through all that a search had: FULL at its last level, else whether it had the token."""
    tokens, parents = search.tokens[row].tolist(), search.parents[row].tolist()
    children = {(parent, child): node for node, (parent, child) in enumerate(zip(parents, tokens, strict=True))}
    node: int | None = -1
    for draft in drafts:
        node = children.get((node, draft)) if node is not None else None
    if node is None:
        return MISSED
    if (node, token) in children:
        return IN_REACH
    return FULL if len(drafts) >= len(search.level_sizes) else MISSED


@contextmanager
def _searches_of(parts: Sequence[Part]) -> Iterator[dict[int, SearchTree]]:
    """Collect the last search of each drafter inside the block."""
    searches: dict[int, SearchTree] = {}

    def keep(number: int, plain: Any, *args: Any, **kwargs: Any) -> Any:
        tree, drafted = plain(*args, **kwargs)
        searches[number] = tree
        return tree, drafted

    try:
        for number, part in enumerate(parts):
            vars(part)["search"] = partial(keep, number, part.search)
        yield searches
    finally:
        for part in parts:
            vars(part).pop("search", None)
