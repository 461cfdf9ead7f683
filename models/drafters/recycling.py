"""Token Recycling: trees of the target's latest choices after each token.

Paper: Token Recycling (arXiv 2408.08696). Verification computes the target's logits at
every entry of a tree: the last token and all nodes. The likeliest tokens there are kept in a table,
as the successors of the entry's token; later entries replace earlier ones. The children of a node
are its token's successors. Ours differs from the paper in four ways:

- A row of the table belongs to the last tokens of a path, up to CONTEXT of them. The longest
  context in the table decides. In the paper a row belongs to one token.
- The tree isn't fixed: the likeliest node is next, by PRIOR. So known contexts are drafted deeper.
- Accepted entries count as the latest of a step, and the prompt's tokens as successors, too.
- The table is empty before each prompt. The paper keeps it, but a benchmark that repeats a prompt
  would then draft from the answer itself.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, PositiveInt
from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE, AcceptedPath, TargetOutput
from ..llm.hf_target import HFTarget
from .beams import largest
from .training_free import TOKEN_BITS, Candidates, TrainingFreeDrafter

PRIOR = (
    (0.40, 0.12, 0.07, 0.05, 0.03, 0.02, 0.02, 0.02),
    (0.70, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01),
    (0.85, 0.05, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01),
)
"""Estimates that a successor is accepted, by the number of tokens in its context and by its rank;
later ranks have the last one. Measured on answers of the demo's target."""
CONTEXT = len(PRIOR)
"""Most tokens of a context. A context is a number: its tokens are the digits, the last one first, and none is 0."""
MASKS = tuple((1 << TOKEN_BITS * n) - 1 for n in range(1, CONTEXT + 1))
"""What leaves the last n tokens of a context."""
LAST_RANK = len(PRIOR[0]) - 1


@dataclass(kw_only=True, config=OPTIONS)
class RecyclingConfig:
    """Options of Token Recycling."""

    tree_nodes: PositiveInt = 40
    """Nodes of the tree."""
    depth: PositiveInt = 10
    """Most tokens on a path."""
    top_k: PositiveInt = 8
    """Successors that are kept for each context."""


class Verified(NamedTuple):
    """What a table learns from a step, or from a prompt, which is read as one accepted path."""

    tokens: Sequence[int]
    """The token of each entry: the last token, then the nodes."""
    parents: Sequence[int]
    """The entry before each entry; NO_NODE is the text before."""
    successors: Sequence[list[int]]
    """The likeliest tokens after each entry; empty if they aren't known."""
    path: Sequence[int]
    """The accepted entries."""


class SuccessorTable:
    """The successors after each context of one text, likeliest first."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self.rows: dict[int, list[int]] = {}
        self.context = 0
        """The context at the end of the text."""

    def add(self, entry: Verified) -> None:
        """Store the successors of all entries, those of the accepted path last."""
        rows = entry.successors
        contexts: list[int] = []
        for token, parent in zip(entry.tokens, entry.parents, strict=True):
            contexts.append(after(self.context if parent == NO_NODE else contexts[parent], token))
        path = set(entry.path)
        others = [index for index in range(len(rows)) if index not in path]
        for index in (*others, *entry.path):
            row, context = rows[index], contexts[index]
            for mask in MASKS[:CONTEXT] if row else ():
                key = context & mask
                self.rows[key] = row if len(row) == self.top_k else self.extended(row, key)
        self.context = contexts[entry.path[-1]]

    def extended(self, row: list[int], key: int) -> list[int]:
        """Return a short row with the successors before it, as far as there is room."""
        return [*row, *[token for token in self.rows.get(key, ()) if token not in row]][: self.top_k]

    def find(self, context: int) -> tuple[list[int], int]:
        """Return the successors after the longest known end of a context, and its number of tokens.

        A text of fewer tokens has no known ones.
        """
        for n in range(CONTEXT, 0, -1):
            if row := self.rows.get(context & MASKS[n - 1]):
                return row, n
        return [], 0


def after(context: int, token: int) -> int:
    """Return the context that ends with a further token."""
    return (context << TOKEN_BITS | token + 1) & MASKS[CONTEXT - 1]


class Recycling(TrainingFreeDrafter):
    """Proposes the likeliest nodes of the tree that the table describes."""

    Config = RecyclingConfig
    config: RecyclingConfig

    @classmethod
    def for_target(cls, config: RecyclingConfig, target: HFTarget) -> "Recycling":
        if config.top_k > target.vocab_size:
            raise ValueError(f"recycling.top_k={config.top_k}: the target has only {target.vocab_size} tokens; lower it")
        return cls(config)

    def new_store(self) -> SuccessorTable:
        return SuccessorTable(self.config.top_k)

    def first_entries(self, prompts: Sequence[list[int]], prefill: TargetOutput) -> list[Verified]:
        return [
            Verified(
                tokens=prompt,
                parents=range(NO_NODE, len(prompt) - 1),
                successors=[*([token] for token in prompt[1:]), []],
                path=range(len(prompt)),
            )
            for prompt in prompts
        ]

    def entries(
        self, last_tokens: Sequence[int], tree: DraftTree, accepted: AcceptedPath, output: TargetOutput
    ) -> list[Verified]:
        top_k, num_nodes = self.config.top_k, tree.num_nodes
        top = largest(output.logits, top_k)[1]
        # The only read from the device: the nodes' tokens and parents, and each entry's successors.
        numbers = torch.cat([tree.tokens, tree.parents, top.flatten(1)], dim=1).tolist()
        verified = []
        for last_token, row, path in zip(last_tokens, numbers, accepted.host_nodes, strict=True):
            num_real = num_nodes - row[:num_nodes].count(NO_NODE)
            first = 2 * num_nodes
            verified.append(
                Verified(
                    tokens=[last_token, *row[:num_real]],
                    parents=[NO_NODE, *[parent + 1 for parent in row[num_nodes : num_nodes + num_real]]],
                    successors=[row[start : start + top_k] for start in range(first, first + top_k * (1 + num_real), top_k)],
                    path=(0, *[node + 1 for node in path]),
                )
            )
        return verified

    def candidates_of(self, store: SuccessorTable, tokens: Sequence[int]) -> Candidates:
        context, most, max_depth = store.context, self.config.tree_nodes, self.config.depth
        for token in tokens:
            context = after(context, token)
        drafts: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        bins: list[int] = []
        depths: list[int] = []
        node, prob = NO_NODE, 1.0
        # The best open node of each parent: minus its probability, its parent, its rank, and the
        # parent's successors, their known context's length, its context and its probability.
        heap: list[tuple[float, int, int, list[int], int, int, float]] = []
        while len(drafts) < most:
            # 1. Open the first child of the newest node.
            row, n = store.find(context)
            if row and (node == NO_NODE or depths[node] < max_depth):
                heapq.heappush(heap, (-prob * PRIOR[n - 1][0], node, 0, row, n, context, prob))
            # 2. The likeliest open node joins the tree, and its next sibling opens.
            if not heap:
                break
            negative, parent, rank, row, n, above, parent_prob = heap[0]
            if rank + 1 < len(row):
                weight = PRIOR[n - 1][min(rank + 1, LAST_RANK)]
                heapq.heapreplace(heap, (-parent_prob * weight, parent, rank + 1, row, n, above, parent_prob))
            else:
                heapq.heappop(heap)
            column = min(rank, LAST_RANK)
            drafts.append(row[rank])
            parents.append(parent)
            scores.append(PRIOR[n - 1][column])
            bins.append((n - 1) * len(PRIOR[0]) + column)
            depths.append(1 if parent == NO_NODE else depths[parent] + 1)
            node, context, prob = len(drafts) - 1, after(above, row[rank]), -negative
        return Candidates(tokens=drafts, parents=parents, scores=scores, bins=bins)
