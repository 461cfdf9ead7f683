"""One draft tree of several drafters, and how much of it is drafted and verified at each step.

The sources' candidates (see `merge_sources`) are merged into one tree (see `merging`), whose nodes are
ranked by their calibrated probability of acceptance (see `calibration`). With `pace: fixed` the tree
has the `tree_nodes` likeliest nodes. With `pace: expected` each step decides which sources it asks,
which nodes a growing model reads, and how many nodes it verifies, by what they are expected to gain
and what they cost (see `pacing`). While a target waits for its weights, the tree grows further.

The trees depend on the texts so far, with `pace: expected` on the clock, and on the target's draws where these are
known before (`RowSeeds`), but never on other random numbers. So the tokens are those of plain decoding, whatever the
clock shows. There are two limits: passes of other shapes round differently, and sampled tokens are the same only with
`RowSeeds`, whose random numbers belong to places of the text.
"""

import time
from bisect import bisect, bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from jaxtyping import Int
from pydantic.dataclasses import dataclass as options

from ...data.fields import OPTIONS, PositiveInt, one_of
from ..decoding.costs import mean_sums, widths_up_to
from ..decoding.pacing import Pacer
from ..decoding.protocols import Drafter, Meanwhile
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree, tree_of
from ..decoding.types import AcceptedPath, Prompts, TargetOutput
from .growing_draft import LEAST_PROB
from .merge_sources import MergedDraft, MergedState, MergeSources, Source
from .merging import MergedRow

PACES = ("expected", "fixed")

EXPECTED_BOUNDS = (0.1, 0.3, 0.6, 1.0, 1.5, 2.5)
"""Bounds of what the groups before are expected to gain, in draft tokens: one half of a situation, by which gains are kept."""
ACCEPTED_BOUNDS = (0.5, 1.5, 3.5)
"""Bounds of the draft tokens accepted in the step before: the other half."""
DEPTH_STEP = 8
"""Trees of few sizes have a multiple of this as the bound of their depth."""


@options(kw_only=True, config=OPTIONS)
class MergedConfig:
    """Options of merged trees."""

    tree_nodes: PositiveInt = 40
    """Most nodes of the merged tree, of all sources together."""
    pace: Annotated[str, one_of(*PACES)] = "expected"
    """`expected`: each step decides which sources draft and how many nodes are verified, by the
    expected gain in time; a draft model's tree grows from step to step. `fixed`: every source drafts
    at each step, and the `tree_nodes` likeliest nodes are verified, so the same texts give the same
    tokens per step."""
    chain: bool = False
    """Draft one path, as for serving engines that verify no trees."""


class Asked(NamedTuple):
    """A group of sources that has drafted, and the tree before that: without its candidates of this step."""

    group: int
    rows: tuple[MergedRow, ...]
    num_nodes: int
    expected: float
    """Tokens that the group is expected to add to the step, scaled by the share that came so far."""


@dataclass(slots=True, kw_only=True)
class PacedStep:
    """What pacing learns from a step when its tree has been verified."""

    pacer: Pacer
    started: float
    """The clock before drafting."""
    asked: list[Asked] = field(default_factory=list)
    """The groups of sources that were asked, in order."""
    expected: float = 1.0
    """Tokens that the step is expected to emit in each row, before scaling."""
    verify_started: float = 0.0
    """The clock after drafting: from here on the size of the tree costs time."""

    def learn(self, tree: DraftTree, accepted: AcceptedPath, now: float) -> None:
        """Learn what the step took and gained."""
        num_accepted = accepted.num_accepted.host
        tokens = 1 + sum(num_accepted) / len(num_accepted)
        self.pacer.add_step(
            tree.num_nodes, tokens, self.expected, self.verify_started - self.started, now - self.verify_started
        )
        learn_gains(self.pacer, self.asked, accepted.new_tokens, num_accepted)


class MergedProposal(NamedTuple):
    """What `advance` needs of a proposal."""

    draft: MergedDraft
    step: PacedStep | None
    """None if the tree isn't paced."""


class MergedDrafter(Drafter[MergedState, MergedProposal]):
    """Drafter that merges the candidates of several sources into one tree.

    Seconds and calibration are learned while decoding and kept in the drafter, for all its texts,
    whatever their lengths and temperatures; they are no part of a state, and follow the latest
    steps. With `few_sizes` trees are padded to few shapes, for targets whose passes are compiled or
    recorded.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        config: MergedConfig,
        *,
        few_sizes: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises ValueError for sources that can't be merged."""
        self.merge = MergeSources(sources, max_nodes=config.tree_nodes, grows=config.pace == "expected", is_chain=config.chain)
        self.config, self.few_sizes, self.clock = config, few_sizes, clock
        # Sources are asked in groups: all training-free ones first, which cost little. Growing models
        # come last: they read what all others have proposed.
        alone = ([index] for index in [*self.merge.searching, *self.merge.models])
        self._groups = [group for group in (self.merge.free, *alone) if group]
        self._pacers: dict[int, Pacer] = {}
        self.tree_sizes = (self.max_nodes,) if config.pace == "fixed" else widths_up_to(self.max_nodes)
        """Sizes of trees with `few_sizes`."""

    @property
    def sources(self) -> Mapping[str, Source]:
        """Return the sources by name."""
        return self.merge.named

    @property
    def max_nodes(self) -> int:
        return self.config.tree_nodes

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.merge.feature_layers

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and answer together; None if the target's limit suffices."""
        lengths = [source.context_length for source in self.sources.values() if source.context_length is not None]
        return min(lengths, default=None)

    def recorded(self, record: Callable[[Source], Any]) -> "MergedDrafter":
        """Return a drafter whose sources are recorded; both measure the same seconds."""
        other = copy(self)
        other.merge = self.merge.recorded(record)
        return other

    # --- decoding: see `Drafter`

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> MergedState:
        if self.config.pace == "expected":
            self._pacer(len(prompts.lengths), begins=True)  # makes the costs of this size
        return self.merge.init_state(prompts, prefill, max_new_tokens=max_new_tokens)

    def propose(
        self, state: MergedState, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, MergedProposal]:
        last_tokens = last_token.tolist() if state.last_tokens is None else state.last_tokens
        started = self.clock()
        draft = self.merge.open(state, last_token, last_tokens, generator)
        if self.config.pace == "fixed":
            for index in range(len(self.sources)):
                self.merge.ask(draft, index)
            self.merge.rank(draft)
            return self._tree(draft.rows, self.max_nodes, last_token.device), MergedProposal(draft, None)
        step = PacedStep(pacer=self._pacer(len(last_tokens)), started=started)
        num_nodes = self._paced(draft, step)
        expected = expected_tokens(draft.rows)
        step.expected = expected[min(num_nodes, len(expected) - 1)]
        step.verify_started = self.clock()
        return self._tree(draft.rows, num_nodes, last_token.device), MergedProposal(draft, step)

    def meanwhile(self, drafted: MergedProposal) -> Meanwhile | None:
        """Return what lets the tree of one row grow while the pass waits."""
        draft = drafted.draft
        return partial(self._grow_on, draft) if draft.grown and len(draft.rows) == 1 else None

    def advance(self, drafted: MergedProposal, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> MergedState:
        state = self.merge.advance(drafted.draft, tree, accepted, output)
        if drafted.step is not None:
            drafted.step.learn(tree, accepted, self.clock())
        return state

    def select(self, state: MergedState, rows: Sequence[int]) -> MergedState:
        return self.merge.select(state, rows)

    # --- pacing

    def _paced(self, draft: MergedDraft, step: PacedStep) -> int:
        """Merge the candidates of the sources that are worth their time; return how many nodes to verify.

        The groups of sources are asked one after another, each only if it is worth its time. A trial only measures seconds:
        all groups are asked, and nothing is learned of gains.
        """
        pacer = step.pacer
        floors = None if pacer.is_trial else pacer.floors()
        self.merge.rank(draft, floors)
        tokens = pacer.trusted(expected_tokens(draft.rows))
        best = pacer.best(tokens)
        accepted = bisect(ACCEPTED_BOUNDS, sum(draft.state.num_accepted) / len(draft.last_tokens))
        for group, indexes in enumerate(self._groups):
            before, rows_before = best, draft.rows
            if not self._has_root(draft, indexes[0]):
                # 1. Skip a group that costs more than it is expected to gain.
                situation = (accepted, bisect(EXPECTED_BOUNDS, tokens[-1] - 1))
                if not pacer.is_trial and not pacer.is_worth(group, situation):
                    continue
                # 2. Merge its candidates. A growing model reads the root: no further pass gains as much, so
                # this one decides whether it is worth its time.
                started = self.clock()
                for index in indexes:
                    self.merge.ask(draft, index)
                self.merge.rank(draft, floors)
                tokens = pacer.trusted(expected_tokens(draft.rows))
                pacer.add_draft(group, self.clock() - started, grows=indexes[0] in draft.grown)
                # 3. Learn what it is expected to add.
                best = pacer.best(tokens)
                if not pacer.is_trial:
                    pacer.add_gain(group, situation, before, best)
            if not pacer.is_trial:
                if indexes[0] in draft.grown:
                    tokens = self._grow(draft, group, pacer, floors, tokens)
                    best = pacer.best(tokens)
                step.asked.append(Asked(group, rows_before, before.nodes, best.tokens - before.tokens))
        return pacer.width(tokens)

    def _has_root(self, draft: MergedDraft, index: int) -> bool:
        """Return whether a growing model has read the last token already: as a draft token, or with a long unread text."""
        return index in draft.grown and draft.state.states[index].is_rooted

    def _grow(
        self, draft: MergedDraft, group: int, pacer: Pacer, floors: Sequence[float] | None, tokens: list[float]
    ) -> list[float]:
        """Let a model read nodes as long as a pass is worth its time; return the expected tokens then."""
        (index,) = self._groups[group]
        best = pacer.best(tokens)
        while any(reads := self.merge.unread(draft, index)):
            # 1. The number of nodes whose children are expected to add most.
            probs = [[merged.prob(node) for node in row] for merged, row in zip(draft.rows, reads, strict=True)]
            count = pacer.num_reads(group, probs)
            if not count:
                break
            # 2. Read them.
            before, started = best, self.clock()
            takes_pass = self.merge.read(draft, index, [row[:count] for row in reads])
            self.merge.rank(draft, floors)
            seconds = self.clock() - started
            tokens = pacer.trusted(expected_tokens(draft.rows))
            best = pacer.best(tokens)
            # 3. Learn what a pass took, and what the children add.
            if takes_pass:
                pacer.add_read(group, [row[:count] for row in probs], seconds, before, best)
        return tokens

    def _grow_on(self, draft: MergedDraft, seconds: float) -> bool:
        """Let a model read some nodes if that fits the wait; return whether one did."""
        for index in draft.grown:
            (nodes,) = self.merge.unread(draft, index)
            nodes = [node for node in nodes if draft.rows[0].prob(node) >= LEAST_PROB]
            if nodes and self._pacer(1).longest_read(self._groups.index([index])) <= seconds:
                self.merge.read(draft, index, [nodes])
                self.merge.rank(draft)
                return True
        return False

    def _pacer(self, batch: int, *, begins: bool = False) -> Pacer:
        """Return the costs of batches of about this size: up to twice as large.

        A new size starts from the nearest one's costs, so that a batch whose rows end one by one
        has no trials in the middle of its answers. Only if a batch `begins`, sizes that are more
        than twice as large or small have trials.
        """
        size = (batch - 1).bit_length()
        if size not in self._pacers:
            nearest = min(self._pacers, key=lambda other: abs(other - size), default=size)
            is_near = abs(nearest - size) == 1 or not begins
            like = self._pacers.get(nearest) if is_near else None
            like = like if like is not None and like.step else None
            self._pacers[size] = Pacer(self.max_nodes, len(self._groups), like)
        return self._pacers[size]

    def _tree(self, rows: Sequence[MergedRow], num_nodes: int, device: torch.device) -> DraftTree:
        """Return the tree of the likeliest nodes of each row, with their sources."""
        origins = tuple(tuple(row.origins[:num_nodes]) for row in rows)
        first = [(row.tokens[:num_nodes], row.parents[:num_nodes]) for row in rows]
        if not self.few_sizes:
            return tree_of(first, device, origins=origins)
        size = self.tree_sizes[bisect_left(self.tree_sizes, max(len(tokens) for tokens, _ in first))]
        depth = max((max(row.depths[:num_nodes], default=0) for row in rows), default=0)
        return tree_of(first, device, num_nodes=size, max_depth=-(-depth // DEPTH_STEP) * DEPTH_STEP, origins=origins)


def expected_tokens(rows: Sequence[MergedRow]) -> list[float]:
    """Return the tokens that a row emits on average with the n likeliest nodes, n = 0, 1, ..."""
    return mean_sums([row.probs for row in rows], initial=1.0)


def learn_gains(pacer: Pacer, asked: Sequence[Asked], texts: Sequence[Sequence[int]], num_accepted: Sequence[int]) -> None:
    """Learn what each group has added: the tokens accepted with it, less those without it.

    `texts` are the tokens that the step has added to each row; all but the last were accepted.
    """
    accepted = [
        sum(row.num_followed(text, part.num_nodes) for row, text in zip(part.rows, texts, strict=True)) for part in asked
    ]
    after = [*accepted, sum(num_accepted)][1:]  # with the group: what the next one would have found, or the tree itself
    for part, without, with_it in zip(asked, accepted, after, strict=True):
        pacer.gains[part.group].add_outcome(part.expected, (with_it - without) / len(texts))
