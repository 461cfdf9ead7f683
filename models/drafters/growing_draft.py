"""The growing tree of a draft model: it is drafted as long as it pays, and survives a step.

With `pace: fixed` a draft model searches anew at each step, to one depth. Here its tree grows
best-first: a draft pass reads the likeliest nodes that it hasn't read, and appends what the model
expects after them. `ExpectedRule` decides after each pass whether another one is worth its time,
and which nodes the target verifies. The tree grows further while the target waits for weights
(`meanwhile`). After the step, the part below the accepted path and the bonus token is kept
with its keys and values, which depend on tokens and positions alone (LLMCad, arXiv 2309.04255,
section 3.4, keeps a branch that was right in the same way).

A node's probability q is the product of calibrated probabilities on its path: see
`ScoreCalibration`. What it has learned is kept here, as the costs are, so one state may propose
different trees. The tokens don't change.

Trees of a batch have rows of different shapes, so a batch drafts anew at each step, by the same
rule. The host reads the device once in each draft pass. Nothing here reads random numbers.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from math import log

import torch
from jaxtyping import Float, Int
from torch.nn.utils.rnn import pad_sequence

from ..decoding.growing_tree import UNREAD, GrowingTree
from ..decoding.growth import ExpectedRule
from ..decoding.pacing import Seconds
from ..decoding.protocols import Meanwhile
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree, chain_tree
from ..decoding.types import MAX_UNREAD, NO_NODE, AcceptedPath, Counts
from ..llm.hf_target import HFTarget
from ..llm.tree_cache import TreeCache
from .beams import SearchTree
from .calibration import ScoreCalibration
from .candidates import Nodes, add_children, learn, likeliest_children, tree_of
from .options import DraftModelConfig

MAX_READS = 8
"""Most nodes that a draft pass reads. So few take about the time of one: reading the weights."""
MAX_ENTRIES = 512
"""Most nodes of a tree whose keys and values the draft model's cache holds, besides the text's.

The target gains from fewer; a tree that grows through a long pass would fill any memory."""
GROWN_NODES = 256
"""Most nodes that are verified where `tree_nodes` sets no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingRow:
    """A row's text behind the cache's, and the tree that hangs from the first of these tokens."""

    tokens: tuple[int, ...]
    tree: GrowingTree = field(default_factory=GrowingTree)
    scores: list[float] = field(default_factory=list)
    """Each node's probability after its parent, as the draft model sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingState:
    """State of a batch of texts, without their last tokens."""

    text: TreeCache
    """Keys and values of the texts without the tokens of `rows`."""
    rows: tuple[GrowingRow, ...]
    has_tree: bool
    """Whether keys and values of the first token and of the tree follow the text's: of one row."""


@dataclass(slots=True, kw_only=True)
class GrowingDraft:
    """Trees in the making. `meanwhile` adds to them."""

    text: TreeCache
    """Keys and values of the texts without the tokens of `rows`; the trees' entries follow them."""
    rows: list[GrowingRow]
    is_rooted: bool
    """Whether the first tokens are the trees' roots and were read. Else trees have no nodes, and
    the last token is to be their root."""
    order: list[list[int]]
    """Each row's node by entry, from entry 1 on."""
    sent: list[list[int]] = field(default_factory=list)
    """Each row's nodes that the target verifies, ascending; empty if it verifies another tree."""
    draft_seconds: float = 0.0
    drafted_at: float = 0.0

    @property
    def trees(self) -> list[GrowingTree]:
        return [row.tree for row in self.rows]


class GrowingSearch:
    """Search of a draft model for likely continuations, over many steps.

    The calibration is one for all texts. So are the costs that the rules learn, by the size of the
    batch (up to twice as large).
    """

    max_entries = MAX_ENTRIES

    def __init__(self, reader: HFTarget, config: DraftModelConfig, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Raises ValueError for a model whose passes are compiled or recorded."""
        if reader.has_fixed_shapes:
            raise ValueError(
                f"drafter.pace is {config.pace}, which drafts trees of every shape, and target.compiled and "
                "target.cuda_graphs compile or record each shape first: set pace to fixed, or both of these to false"
            )
        self.reader, self.max_nodes, self.clock = reader, config.tree_nodes or GROWN_NODES, clock
        self.calibration = ScoreCalibration()
        self._rules: dict[int, ExpectedRule] = {}
        self._pass_seconds = Seconds()

    def rule(self, batch: int) -> ExpectedRule:
        """Return the rule of batches of about this size."""
        size = (batch - 1).bit_length()
        if size not in self._rules:
            self._rules[size] = ExpectedRule(self.max_nodes, MAX_READS)
        return self._rules[size]

    # --- decoding: see `DraftModel`

    def begin(self, text: TreeCache, last_tokens: Int[torch.Tensor, " batch"]) -> GrowingState:
        """Return the state of texts whose last tokens aren't in the cache."""
        rows = tuple(GrowingRow(tokens=(token,)) for token in last_tokens.tolist())
        return GrowingState(text=text, rows=rows, has_tree=False)

    def propose(
        self, state: GrowingState, last_token: Int[torch.Tensor, " batch"], generator: Randomness
    ) -> tuple[DraftTree, GrowingDraft]:
        started = self.clock()
        draft = self._draft(state, last_token)
        draft.sent = self.rule(len(draft.rows)).sends(draft.trees)
        nodes = [_nodes(tree, sent) for tree, sent in zip(draft.trees, draft.sent, strict=True)]
        draft.drafted_at = self.clock()
        draft.draft_seconds = draft.drafted_at - started
        return tree_of(nodes, last_token.device), draft

    def search(self, state: GrowingState, last_token: Int[torch.Tensor, " batch"]) -> tuple[SearchTree, GrowingDraft]:
        """Return the likeliest nodes of the trees, as many as all rows have, and the drafts."""
        started = self.clock()
        draft = self._draft(state, last_token)
        size = min(self.max_nodes, *map(len, draft.trees))
        rows = [_path_scores(row, row.tree.first(size)) for row in draft.rows]
        tokens, parents = (torch.tensor([row[column] for row in rows], dtype=torch.long) for column in (0, 1))
        scores = torch.tensor([row[2] for row in rows])
        levels = (size,) if size else ()
        draft.sent = [tree.first(size) for tree in draft.trees]
        draft.drafted_at = self.clock()
        draft.draft_seconds = draft.drafted_at - started
        return SearchTree(tokens=tokens, parents=parents, scores=scores, level_sizes=levels), draft

    def skip(self, state: GrowingState, last_token: Int[torch.Tensor, " batch"]) -> GrowingState | GrowingDraft:
        """Leave the last token unread as well, unless there are many such tokens."""
        last_tokens: list[int] = last_token.tolist()
        if max(len(row.tokens) for row in state.rows) < MAX_UNREAD:
            rows = tuple(replace(row, tokens=(*row.tokens, token)) for row, token in zip(state.rows, last_tokens, strict=True))
            return replace(state, rows=rows)
        draft = self._continued(state, last_tokens)
        if not draft.is_rooted:
            self._read(draft, [[NO_NODE]] * len(last_tokens))
        return draft

    def meanwhile(self, draft: GrowingDraft | GrowingState) -> Meanwhile | None:
        """Return what lets the tree of one row grow."""
        if isinstance(draft, GrowingState) or len(draft.rows) > 1:
            return None
        return partial(self._draft_on, draft)

    def advance(self, drafted: GrowingDraft | GrowingState, tree: DraftTree, accepted: AcceptedPath) -> GrowingState:
        state = drafted if isinstance(drafted, GrowingState) else self._state_of(drafted, accepted)
        rows = zip(state.rows, accepted.tokens, strict=True)
        return replace(state, rows=tuple(replace(row, tokens=(*row.tokens, *tokens)) for row, tokens in rows))

    def select(self, state: GrowingState, rows: Sequence[int]) -> GrowingState:
        state.text.select(rows)
        return GrowingState(text=state.text, rows=tuple(state.rows[row] for row in rows), has_tree=False)

    # --- decoding one text without steps: see `streaming_models`

    def start(self, state: GrowingState, last_token: int) -> GrowingDraft:
        """Return a draft without nodes after a text and its last token."""
        return self._continued(state, [last_token])

    def room(self, draft: GrowingDraft) -> int:
        """Return how many more nodes of each row may be read."""
        return MAX_ENTRIES - len(draft.order[0])

    def read(self, draft: GrowingDraft, nodes: Sequence[int]) -> None:
        """Read some nodes of the only row, or its root (NO_NODE), and append their children."""
        self._read(draft, [nodes])

    def follow(self, draft: GrowingDraft, tokens: Sequence[int]) -> GrowingDraft:
        """Return the draft below the last of these tokens, which the target has committed."""
        (row,) = draft.rows
        rows = (replace(row, tokens=(*row.tokens, *tokens[:-1])),)
        draft = self._continued(GrowingState(text=draft.text, rows=rows, has_tree=draft.is_rooted), tokens[-1:])
        if not draft.is_rooted and len(draft.rows[0].tokens) > MAX_UNREAD:
            self._read(draft, [[NO_NODE]])
        return draft

    # --- drafting

    def _draft(self, state: GrowingState, last_token: Int[torch.Tensor, " batch"]) -> GrowingDraft:
        """Continue the trees below the last tokens, and let them grow as long as it pays."""
        draft = self._continued(state, last_token.tolist())
        rule = self.rule(len(draft.rows))
        if not draft.is_rooted and max(len(row.tokens) for row in draft.rows) > MAX_UNREAD:
            self._read(draft, [[NO_NODE]] * len(draft.rows))
        while self._has_room(draft) and any(reads := rule.reads(draft.trees)):
            self._read(draft, reads)
        return draft

    def _draft_on(self, draft: GrowingDraft, seconds: float) -> bool:
        """Read some nodes while the target waits, if that fits the wait; return whether it did."""
        if self._pass_seconds.median > seconds or not self._has_room(draft):
            return False
        reads = self.rule(1).spare_reads(draft.trees[0], seconds)
        if reads:
            self._read(draft, [reads])
        return bool(reads)

    def _has_room(self, draft: GrowingDraft) -> bool:
        return self.room(draft) >= MAX_READS

    def _continued(self, state: GrowingState, last_tokens: Sequence[int]) -> GrowingDraft:
        """Return the trees below the last tokens: what is left of the last ones, or empty ones."""
        rows = [replace(row, tokens=(*row.tokens, token)) for row, token in zip(state.rows, last_tokens, strict=True)]
        for row in rows:
            learn(row.tree, row.scores, row.tokens[1:], self.calibration)
        if state.has_tree:
            return self._rerooted(state.text, rows[0])
        empty = [GrowingRow(tokens=row.tokens) for row in rows]
        return GrowingDraft(text=state.text, rows=empty, is_rooted=False, order=[[] for _ in empty])

    def _rerooted(self, cache: TreeCache, row: GrowingRow) -> GrowingDraft:
        """Commit the tokens that were read, and keep the tree below the last token if it was read."""
        _, *tokens = row.tokens
        rerooted = row.tree.rerooted(tokens)
        # 1. The tree doesn't have the last token, or hasn't read it: keep the text that it has read.
        if rerooted is None:
            path = [row.tree.entries[node] for node in row.tree.follow(tokens)]
            path = list(takewhile(lambda entry: entry != UNREAD, path))
            _keep(cache, [0, *path], 1 + len(path))
            rest = GrowingRow(tokens=row.tokens[1 + len(path) :])
            return GrowingDraft(text=cache, rows=[rest], is_rooted=False, order=[[]])
        # 2. Move the entries that stay behind the text.
        _keep(cache, [0, *rerooted.path, *rerooted.entries], 1 + len(rerooted.path))
        # 3. Estimate the nodes anew: they are less deep now, and there is more to learn from.
        tree, scores = rerooted.tree, [row.scores[node] for node in rerooted.nodes]
        tree.reweigh([*map(self.calibration.estimate, tree.depths, scores)])
        kept = GrowingRow(tokens=row.tokens[-1:], tree=tree, scores=scores)
        return GrowingDraft(text=cache, rows=[kept], is_rooted=True, order=[_order(tree)])

    def _read(self, draft: GrowingDraft, reads: Sequence[Sequence[int]]) -> None:
        """Read some nodes of each row, or the tokens up to the roots, and append their children."""
        started = self.clock()
        logits = self._read_nodes(draft, reads) if draft.is_rooted else self._read_roots(draft)
        # 1. Append the likeliest tokens after each node.
        for row, nodes, children in zip(draft.rows, reads, likeliest_children(logits), strict=True):
            for node, (tokens, scores) in zip(nodes, children, strict=False):
                add_children(row.tree, row.scores, node, tokens, scores, self.calibration)
        # 2. Learn what it took.
        seconds = self.clock() - started
        self._pass_seconds.add(seconds)
        self.rule(len(draft.rows)).add_draft(draft.trees, reads, seconds)

    def _read_roots(self, draft: GrowingDraft) -> Float[torch.Tensor, "batch 1 vocab"]:
        """Read each row's unread tokens: all but the last join the text, the last is the root."""
        cache, device = draft.text, self.reader.device
        tokens = pad_sequence([torch.tensor(row.tokens) for row in draft.rows], batch_first=True).to(device)
        logits = self.reader.read_tree(cache, tokens[:, 0], chain_tree(tokens[:, 1:])).logits
        last = Counts.of([len(row.tokens) - 1 for row in draft.rows], device)
        cache.keep(None, last)
        draft.rows = [replace(row, tokens=row.tokens[-1:]) for row in draft.rows]
        draft.is_rooted = True
        return logits.gather(1, last.device[:, None, None].expand(-1, 1, logits.shape[-1]))

    def _read_nodes(self, draft: GrowingDraft, reads: Sequence[Sequence[int]]) -> Float[torch.Tensor, "batch node vocab"]:
        """Read some nodes of each row, behind those that were read before."""
        cache, width, first = draft.text, max(map(len, reads)), 1 + len(draft.order[0])
        for row, order, nodes in zip(draft.rows, draft.order, reads, strict=True):
            for entry, node in enumerate(nodes, first):
                row.tree.mark_read(node, entry)
            # A row that reads fewer nodes reads its first one again: no query sees a difference.
            order += [*nodes, *[0] * (width - len(nodes))]
        roots = torch.tensor([row.tokens[0] for row in draft.rows], device=self.reader.device)
        nodes_read = [_nodes(tree, order) for tree, order in zip(draft.trees, draft.order, strict=True)]
        tree = tree_of(nodes_read, self.reader.device)
        return self.reader.read_tree(cache, roots, tree, num_read=first).logits

    def _state_of(self, draft: GrowingDraft, accepted: AcceptedPath) -> GrowingState:
        """Return the state before the accepted tokens, and learn from the step."""
        if draft.sent:
            # In a merge the target verified other nodes too: those count as this tree does.
            paths = [tree.follow(tokens) for tree, tokens in zip(draft.trees, accepted.tokens, strict=True)]
            paths = [[node for node in path if node in nodes] for path, nodes in zip(paths, map(set, draft.sent), strict=True)]
            seconds = self.clock() - draft.drafted_at
            self.rule(len(draft.rows)).add_step(draft.trees, draft.sent, paths, draft.draft_seconds, seconds)
        return GrowingState(text=draft.text, rows=tuple(draft.rows), has_tree=draft.is_rooted and len(draft.rows) == 1)


def _keep(cache: TreeCache, entries: list[int], count: int) -> None:
    """Move these entries of one row behind its text, and commit the first `count` of them."""
    device = cache.lengths.device.device
    in_place = entries == list(range(len(entries)))
    cache.keep(None if in_place else torch.tensor([entries], device=device), Counts.of([count], device))


def _nodes(tree: GrowingTree, nodes: Sequence[int]) -> Nodes:
    tokens, parents = tree.links(nodes)
    return Nodes(tokens=tokens, parents=parents)


def _order(tree: GrowingTree) -> list[int]:
    """Return the nodes that were read, by entry."""
    return sorted((node for node, entry in enumerate(tree.entries) if entry != UNREAD), key=tree.entries.__getitem__)


def _path_scores(row: GrowingRow, nodes: Sequence[int]) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, parents and log-probabilities of whole paths, as a search has them."""
    tokens, parents = row.tree.links(nodes)
    scores: list[float] = []
    for node, parent in zip(nodes, parents, strict=True):
        score = row.scores[node]
        above = 0.0 if parent == NO_NODE else scores[parent]
        scores.append(above + (log(score) if score > 0.0 else -torch.inf))
    return tokens, parents, scores
