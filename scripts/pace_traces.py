"""Traces for the pace study: what a draft model would draft at each position of real answers.

A trace is a trie of contexts. Its trunk is the target's answer; from each position of the answer
hang the likeliest other continuations, as the draft model sees them. A tree that grows from any
position, in any order, can be replayed from it: only contexts that are too unlikely to be read are
missing, and these are never accepted.
"""

import heapq
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.data.chat import encode_prompt
from outrider.data.files import replacing
from outrider.data.suites import Prompt
from outrider.data.types import Turn
from outrider.models.decoding.acceptance import GreedyAcceptance
from outrider.models.decoding.loop import generate
from outrider.models.decoding.prompts import Prompts
from outrider.models.decoding.tree import DraftTree
from outrider.models.decoding.types import NO_NODE, Counts
from outrider.models.drafters.candidates import depths_of
from outrider.models.drafters.null import NullDrafter
from outrider.models.llm.hf_target import HFTarget

TOP_K = 8
"""Children of each context."""
WIDTH = 16
"""Nodes that a pass reads in each row."""
ROWS = 32
"""Positions that are read together."""
UNREAD, NEXT = -1, -2
"""Context of a child that isn't in the trace, and of the answer's next token while it is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One answer. Contexts 0, 1, ... are its positions; those off the answer follow.

    Children of context c are `first[c]` to `first[c + 1]`, the likeliest first.
    """

    num_tokens: int
    first: NDArray[np.int32]
    probs: NDArray[np.float32]
    """Of each child: the draft model's probability after its context."""
    contexts: NDArray[np.int32]
    """Of each child: its own context, or UNREAD. That of the answer's next token is the next position."""

    def save(self, path: Path) -> None:
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, num_tokens=self.num_tokens, first=self.first, probs=self.probs, contexts=self.contexts)

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read a trace. Raises ValueError for a damaged file."""
        try:
            with path.open("rb") as opened, np.load(opened) as file:
                return cls(num_tokens=int(file["num_tokens"]), **{name: file[name] for name in ("first", "probs", "contexts")})
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged ({error}); delete it, and the same command makes it again") from error


def prompt_ids(prompt: Prompt, target: HFTarget) -> torch.Tensor:
    return encode_prompt([Turn(role="user", content=prompt.turns[0])], target.tokenizer)[0]


@torch.inference_mode()
def trace_answer(target: HFTarget, reader: HFTarget, ids: torch.Tensor, new_tokens: int, num_reads: int) -> Trace:
    """Let the target answer, and read the draft model's likeliest continuations of each position.

    `num_reads` continuations of a position are read, besides the answer itself.
    """
    steps = generate(target, NullDrafter(), GreedyAcceptance(), [ids], max_new_tokens=new_tokens, stop_ids=target.stop_ids)
    answer = [token for step in steps for token in step.tokens[0]]
    text = torch.cat([ids, torch.tensor(answer)])
    rows: list[Row] = []
    for start in range(0, len(answer), ROWS):
        chunk = range(start, min(start + ROWS, len(answer)))
        prefixes = [text[: len(ids) + position] for position in chunk]
        rows += read_rows(reader, prefixes, [answer[position] for position in chunk], num_reads)
    return joined(rows)


class Row:
    """Continuations of a position: the nodes that were read, and the children of each.

    `next_token` is the answer's, whose continuations belong to the next position.
    """

    def __init__(self, next_token: int) -> None:
        self.next_token = next_token
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.children: list[list[tuple[float, int]]] = []
        """Of the root, then of each node: probability, and node, NEXT or UNREAD."""
        self._heap: list[tuple[float, int, int, int]] = []
        self._paths: list[float] = []
        """Probability of each node's path."""

    def add(self, tokens: Sequence[int], probs: Sequence[float]) -> None:
        """Add the children of the root, then of each node in order."""
        parent = len(self.children) - 1
        path = self._paths[parent] if parent >= 0 else 1.0
        is_next = [parent == NO_NODE and token == self.next_token for token in tokens]
        self.children.append([(prob, NEXT if follows else UNREAD) for prob, follows in zip(probs, is_next, strict=True)])
        for child, (token, prob, follows) in enumerate(zip(tokens, probs, is_next, strict=True)):
            if not follows:
                heapq.heappush(self._heap, (-path * prob, parent, child, token))

    @property
    def num_unread(self) -> int:
        return len(self._heap)

    def read(self, count: int) -> None:
        """Append the likeliest unread children as nodes."""
        for _ in range(count):
            negative, parent, child, token = heapq.heappop(self._heap)
            prob, _ = self.children[parent + 1][child]
            self.children[parent + 1][child] = prob, len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self._paths.append(-negative)


def read_rows(reader: HFTarget, texts: Sequence[torch.Tensor], next_tokens: Sequence[int], num_reads: int) -> list[Row]:
    """Read the likeliest continuations of each text."""
    # 1. The texts without their last tokens, with which the first pass begins.
    prompts = Prompts.of(texts)
    reader.prefill(prompts, max_new_tokens=1, max_nodes=num_reads)
    cache, last_token = reader.hand_over_cache(), prompts.last(prompts.input_ids)
    cache.rewind(Counts.of([1] * len(texts), last_token.device))
    rows, num_read = [Row(token) for token in next_tokens], 0
    while True:
        # 2. Read the new nodes, and add their children.
        tree = DraftTree(
            tokens=torch.tensor([row.tokens for row in rows], dtype=torch.long),
            parents=torch.tensor([row.parents for row in rows], dtype=torch.long),
            max_depth=max(max(depths_of(row.parents), default=0) for row in rows),
        )
        probs, tokens = reader.read_tree(cache, last_token, tree, num_read=num_read).logits.softmax(-1).topk(TOP_K)
        for row, row_tokens, row_probs in zip(rows, tokens.tolist(), probs.tolist(), strict=True):
            for new in zip(row_tokens, row_probs, strict=True):
                row.add(*new)
        # 3. Choose the next nodes, equally many in each row.
        num_read = 1 + tree.num_nodes
        count = min(WIDTH, num_reads - tree.num_nodes, *(row.num_unread for row in rows))
        if count <= 0:
            return rows
        for row in rows:
            row.read(count)


def joined(rows: Sequence[Row]) -> Trace:
    """Join the positions of an answer: the answer's next token leads to the next position."""
    first, probs, contexts = [0], [], []
    # Contexts off the answer are numbered behind its positions, of which the last has no children.
    starts = list(accumulate((len(row.tokens) for row in rows), initial=len(rows) + 1))

    def append(position: int, children: Sequence[tuple[float, int]]) -> None:
        for prob, node in children:
            probs.append(prob)
            contexts.append(position + 1 if node == NEXT else UNREAD if node == UNREAD else starts[position] + node)
        first.append(len(probs))

    for position, row in enumerate(rows):
        append(position, row.children[0])
    append(len(rows), [])
    for position, row in enumerate(rows):
        for children in row.children[1:]:
            append(position, children)
    return Trace(
        num_tokens=len(rows),
        first=np.array(first, dtype=np.int32),
        probs=np.array(probs, dtype=np.float32),
        contexts=np.array(contexts, dtype=np.int32),
    )
