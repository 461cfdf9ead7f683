"""A draft model that reads nodes of a growing tree, and whose keys and values outlive a step.

Without growing, a draft model searches from scratch in each step. Here a merge (see `merge_sources`) says
which nodes are read: those that are likeliest, whichever source has proposed them. Each read node
gets the model's likeliest next tokens as children. After the step, the part below the accepted path and the bonus token is kept
with its keys and values, which depend on tokens and positions alone (LLMCad, arXiv 2309.04255,
section 3.4, keeps a branch that was right in the same way).

Trees of a batch have rows of different shapes, so a batch drafts anew at each step. The host reads
the device once in each draft pass. Nothing here reads random numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import isnan

import torch
from jaxtyping import Float
from torch.nn.utils.rnn import pad_sequence

from ..decoding.growing_tree import UNREAD, GrowingTree
from ..decoding.sampling import Randomness, RowSeeds, foreseen
from ..decoding.tree import DraftTree, chain_tree, tree_of
from ..decoding.types import MAX_UNREAD, NO_NODE, AcceptedPath, Counts, Prompts, TargetOutput
from ..llm.hf_target import HFTarget
from ..llm.tree_cache import TreeCache
from .beams import largest

MAX_CHILDREN = 8
"""Most children of a node: the model's likeliest tokens."""
LEAST_PROB = 0.001
"""Less likely tokens don't become nodes."""
MAX_ENTRIES = 512
"""Most nodes of a tree whose keys and values the draft model's cache holds, besides the text's.

A tree that keeps growing from step to step would fill any memory."""


@dataclass(slots=True, kw_only=True)
class GrowingRow:
    """A row's text behind the cache's, and the tree that hangs from the first of these tokens.

    The tree's estimates are the model's own probabilities, of what the target will draw where its clocks are
    known (see `foreseen`): a node's clock stays the same from step to step. 0 marks a node of another source.
    """

    tokens: list[int]
    tree: GrowingTree = field(default_factory=GrowingTree)
    order: list[int] = field(default_factory=list)
    """The node by entry, from entry 1 on."""

    def adopt(self, parent: int, token: int) -> int:
        """Return the child of a node with this token; a token of another source is appended."""
        tree = self.tree
        for child in tree.children(parent):
            if tree.tokens[child] == token:
                return child
        tree.add(parent, [token], [0.0])
        return len(tree) - 1


@dataclass(slots=True, kw_only=True)
class GrowingText:
    """A batch of texts, and the trees in the making after them."""

    cache: TreeCache
    """Keys and values of the texts without the tokens of `rows`; the trees' entries follow them."""
    rows: list[GrowingRow]
    is_rooted: bool = False
    """Whether the first tokens are the trees' roots and were read. Else trees have no nodes, and
    the last token is to be their root."""


class GrowingModel:
    """A draft model as a source of growing trees.

    `read_prompts` returns the reader's cache of prompts without their last tokens.
    """

    def __init__(self, reader: HFTarget, read_prompts: Callable[..., TreeCache]) -> None:
        self.reader, self.read_prompts = reader, read_prompts

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> GrowingText:
        """Return the state after the prompts without their last tokens. Raises ValueError for a prompt that is too long."""
        cache = self.read_prompts(prompts, max_new_tokens=max_new_tokens, max_nodes=MAX_ENTRIES)
        return GrowingText(cache=cache, rows=[GrowingRow(tokens=[token]) for token in prompts.last(prompts.input_ids).tolist()])

    def open(self, state: GrowingText, last_tokens: Sequence[int], generator: Randomness = None) -> None:
        """Append the last tokens, and keep what is left of the trees below them."""
        for row, token in zip(state.rows, last_tokens, strict=True):
            row.tokens.append(token)
        if state.is_rooted:
            self._reroot(state)
        if not state.is_rooted and max(len(row.tokens) for row in state.rows) > MAX_UNREAD:
            self.read(state, [[NO_NODE]] * len(state.rows), generator)

    def room(self, state: GrowingText) -> int:
        """Return how many more nodes of each row may be read."""
        return MAX_ENTRIES - len(state.rows[0].order)

    def read(self, state: GrowingText, reads: Sequence[Sequence[int]], generator: Randomness = None) -> None:
        """Read some nodes of each row in one pass, and append their children.

        Their parents have been read before. The only node of an empty tree is the root, NO_NODE.
        """
        logits = self._read_nodes(state, reads) if state.is_rooted else self._read_roots(state)
        if isinstance(generator, RowSeeds):
            depths = torch.zeros(logits.shape[:2], dtype=torch.long)
            for row, nodes, places in zip(state.rows, reads, depths, strict=True):
                places[: len(nodes)] = torch.tensor([0 if node == NO_NODE else row.tree.depths[node] for node in nodes])
            logits = foreseen(logits, depths.to(logits.device), generator)
        for row, nodes, children in zip(state.rows, reads, likeliest_children(logits), strict=True):
            for node, (tokens, probs) in zip(nodes, children, strict=False):
                row.tree.add(node, tokens, probs)

    def advance(self, state: GrowingText, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> GrowingText:
        """Return the state after the accepted path of any tree. Only one row keeps its own tree."""
        for row, tokens in zip(state.rows, accepted.tokens, strict=True):
            row.tokens += tokens
        if len(state.rows) > 1:
            _forget_trees(state)
        return state

    def select(self, state: GrowingText, rows: Sequence[int]) -> GrowingText:
        """Return the state of these rows of the batch only, without trees."""
        state.cache.select(rows)
        return GrowingText(cache=state.cache, rows=[GrowingRow(tokens=[*state.rows[row].tokens]) for row in rows])

    def _reroot(self, state: GrowingText) -> None:
        """Commit the tokens that were read, and keep the tree below the last token if it was read."""
        (row,) = state.rows
        _, *tokens = row.tokens
        rerooted = row.tree.rerooted(tokens)
        # 1. The tree doesn't have the last token, or hasn't read it: keep the text that it has read.
        if rerooted is None:
            path = [row.tree.cache_entries[node] for node in row.tree.follow(tokens)]
            path = list(takewhile(lambda entry: entry != UNREAD, path))
            _keep(state.cache, [0, *path], 1 + len(path))
            row.tokens = row.tokens[1 + len(path) :]
            _forget_trees(state)
            return
        # 2. Move the entries that stay behind the text.
        _keep(state.cache, [0, *rerooted.path, *rerooted.entries], 1 + len(rerooted.path))
        row.tokens, row.tree = row.tokens[-1:], rerooted.tree
        entries = row.tree.cache_entries
        row.order = sorted((node for node, entry in enumerate(entries) if entry != UNREAD), key=entries.__getitem__)

    def _read_roots(self, state: GrowingText) -> Float[torch.Tensor, "batch 1 vocab"]:
        """Read each row's unread tokens: all but the last join the text, the last is the root."""
        cache, device = state.cache, self.reader.device
        tokens = pad_sequence([torch.tensor(row.tokens) for row in state.rows], batch_first=True).to(device)
        logits = self.reader.read_tree(cache, tokens[:, 0], chain_tree(tokens[:, 1:])).logits
        last = Counts.of([len(row.tokens) - 1 for row in state.rows], device)
        cache.keep(None, last)
        for row in state.rows:
            row.tokens = row.tokens[-1:]
        state.is_rooted = True
        return logits.gather(1, last.device[:, None, None].expand(-1, 1, logits.shape[-1]))

    def _read_nodes(self, state: GrowingText, reads: Sequence[Sequence[int]]) -> Float[torch.Tensor, "batch node vocab"]:
        """Read some nodes of each row, behind those that were read before."""
        width, first = max(map(len, reads)), 1 + len(state.rows[0].order)
        for row, nodes in zip(state.rows, reads, strict=True):
            for entry, node in enumerate(nodes, first):
                row.tree.mark_read(node, entry)
            # A row that reads fewer nodes fills its entries up with node 0: no query sees a difference.
            row.order += [*nodes, *[0] * (width - len(nodes))]
        roots = torch.tensor([row.tokens[0] for row in state.rows], device=self.reader.device)
        tree = tree_of([row.tree.links(row.order) for row in state.rows], self.reader.device)
        return self.reader.read_tree(state.cache, roots, tree, num_read=first).logits


def _forget_trees(state: GrowingText) -> None:
    state.is_rooted = False
    for row in state.rows:
        row.tree, row.order = GrowingTree(), []


def _keep(cache: TreeCache, entries: list[int], count: int) -> None:
    """Move these entries of one row behind its text, and commit the first `count` of them."""
    device = cache.lengths.device.device
    in_place = entries == list(range(len(entries)))
    cache.keep(None if in_place else torch.tensor([entries], device=device), Counts.of([count], device))


def likeliest_children(logits: Float[torch.Tensor, "batch node vocab"]) -> list[list[tuple[list[int], list[float]]]]:
    """Return the likeliest tokens after each node and their probabilities, row by row.

    There is at least one. The host waits once. Raises ValueError for logits that are NaN.
    """
    top, tokens = largest(logits.float(), min(MAX_CHILDREN, logits.shape[-1]))
    probs = (top - logits.float().logsumexp(-1, keepdim=True)).exp()
    # One transfer: float64 holds every token exactly.
    values = torch.stack([tokens.double(), probs.double()], dim=2).tolist()
    if any(isnan(sum(row_probs)) for row in values for _, row_probs in row):
        raise ValueError(
            "the draft model's logits are not numbers (NaN): its weights are damaged, or its type overflows; load another "
            "copy, or load it in another target.dtype"
        )
    return [[_likely(tokens, probs) for tokens, probs in row] for row in values]


def _likely(tokens: Sequence[float], probs: Sequence[float]) -> tuple[list[int], list[float]]:
    count = max(1, sum(prob >= LEAST_PROB for prob in probs))
    return [*map(int, tokens[:count])], [*probs[:count]]
