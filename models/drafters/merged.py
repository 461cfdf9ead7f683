"""One draft tree of several drafters, and how much of it is drafted and verified at each step.

The sources' candidates are merged into one tree (see `merging`), whose nodes are ranked by their
calibrated probability of acceptance (see `calibration`). With `pace: fixed` the tree has the
`tree_nodes` likeliest nodes. With `pace: expected` each step decides which sources it asks and how
many nodes it verifies, by what they are expected to gain and what they cost (see `pacing`).

There are three kinds of sources. A training-free drafter looks its candidates up. A trained one
searches once a step. And with `pace: expected` a draft model grows (see `growing_draft`): each of its
passes reads the likeliest nodes of the merged tree, whichever source has proposed them.

    the text    a b c
    suffix      d e f             tree   d ─┬─ e ─── f ─── g     g: the draft model has read f,
    model       d x                         └─ x                    which only suffix proposed

While a target waits for its weights, the tree grows further (`meanwhile`).

The trees depend on the texts so far, and with `pace: expected` on the clock, but never on random
numbers. So the tokens are those of plain decoding, greedy or sampled, whatever the clock shows: up to the
rounding of passes of other shapes, and sampled ones if random numbers belong to places of the text
(`RowSeeds`).
"""

import time
from bisect import bisect, bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from jaxtyping import Int
from pydantic.dataclasses import dataclass as options

from ...data.fields import OPTIONS, PositiveInt, one_of
from ..decoding.growing_tree import UNREAD
from ..decoding.pacing import MAX_READS, Pacer, mean_sums, widths_up_to
from ..decoding.protocols import Drafter, Meanwhile
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE, AcceptedPath, Prompts, TargetOutput
from .base import TrainableDrafter
from .calibration import BIN_BOUNDS, MAX_SOURCES, OutcomeCounts, start_of_text
from .candidates import tree_of
from .draft_model import DraftModel
from .growing_draft import LEAST_PROB, GrowingModel, GrowingRow, GrowingText
from .merging import MAX_WALKS, MergedRow, MergeWalk, Proposals, follow, grow, rows_of_search
from .training_free import TextState, TrainingFreeDrafter

PACES = ("expected", "fixed")

EXPECTED_BOUNDS = (0.1, 0.3, 0.6, 1.0, 1.5, 2.5)
"""Bounds of what the sources asked before expect, in draft tokens: gains are counted by it."""
ACCEPTED_BOUNDS = (0.5, 1.5, 3.5)
"""Bounds of the draft tokens accepted in the step before: gains are counted by it, too."""
DEPTH_STEP = 8
"""Trees of few sizes have a multiple of this as the bound of their depth."""
FOREIGN = -2
"""Parent of a node in a growing model's proposals, if it isn't the model's own candidate."""

Source = TrainableDrafter | TrainingFreeDrafter


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


@dataclass(slots=True, kw_only=True)
class MergedText:
    """What a merge knows of one row's text."""

    counts: OutcomeCounts
    """The calibration of this text."""
    walks: tuple[MergeWalk, ...] = ()
    """The proposals that the text has followed so far, up to its last accepted token."""

    def follow(self, tokens: Sequence[int], *counts: OutcomeCounts) -> None:
        """Learn from the tokens that the target has chosen."""
        for token in tokens:
            self.walks = follow(self.walks[-MAX_WALKS:], token, self.counts, *counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedState:
    """The states of the sources, and what each row's text has shown."""

    sources: tuple[Any, ...]
    texts: tuple[MergedText, ...]
    num_accepted: tuple[int, ...]
    """Accepted draft tokens of the last step."""
    last_tokens: tuple[int, ...] | None = None
    """The last token of each row; None if the host hasn't read it yet."""


class Asked(NamedTuple):
    """A group of sources that was asked, and the tree that there would have been without it."""

    group: int
    rows: tuple[MergedRow, ...]
    num_nodes: int
    expected: float
    """Tokens that the group is expected to add to the step."""


@dataclass(slots=True, kw_only=True)
class MergedDraft:
    """A merged tree in the making, and what `advance` needs of it."""

    state: MergedState
    last_token: Int[torch.Tensor, " batch"]
    last_tokens: Sequence[int]
    drafted: dict[int, Any] = field(default_factory=dict)
    """What each source that was asked needs to advance, by its index."""
    proposals: list[list[Proposals]]
    """The candidates so far, by row."""
    grown: dict[int, list[Proposals]] = field(default_factory=dict)
    """Those of the growing models, by the model's index; a node has the same number in its tree."""
    rows: tuple[MergedRow, ...] = ()
    """The merged trees."""
    pacer: Pacer | None = None
    """What learns from the step; None if the tree isn't paced."""
    expected: float = 1.0
    """Tokens that the step is expected to emit in each row."""
    asked: list[Asked] = field(default_factory=list)
    """The groups of sources that were asked, in order, if the tree is paced."""
    draft_seconds: float = 0.0
    drafted_at: float = 0.0
    """The clock when the tree was begun: its size costs time from here on."""


class MergedDrafter(Drafter[MergedState, MergedDraft]):
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
        vocab_sizes = {name: source.vocab_size for name, source in sources.items() if isinstance(source, TrainableDrafter)}
        require_mergeable({name: source.config for name, source in sources.items()}, vocab_sizes)
        self.sources, self.config, self.few_sizes, self.clock = dict(sources), config, few_sizes, clock
        self.counts: OutcomeCounts = {}
        self._sources: tuple[Any, ...] = tuple(map(self._growing, sources.values()))
        self._layers = tuple(source.feature_layers for source in sources.values())
        self._all_layers = tuple(sorted({layer for layers in self._layers for layer in layers}))
        # Sources are asked in groups: all training-free ones first, which cost little. Growing models
        # come last: they read what all others have proposed.
        free, trained, self._models = map(self._indexes, (TrainingFreeDrafter, TrainableDrafter, GrowingModel))
        self._groups = [group for group in (free, *([index] for index in [*trained, *self._models])) if group]
        self._pacers: dict[int, Pacer] = {}

    def _growing(self, source: Source) -> Any:
        """Return a source as it drafts: a draft model grows, unless its passes have fixed shapes."""
        if isinstance(source, DraftModel) and self.config.pace == "expected" and not source.reader.has_fixed_shapes:
            return GrowingModel(source)
        return source

    @property
    def free(self) -> dict[int, TrainingFreeDrafter]:
        """Return the training-free sources by their index."""
        return {index: self._sources[index] for index in self._indexes(TrainingFreeDrafter)}

    @property
    def searching(self) -> list[int]:
        """Return the indexes of the sources that search once a step."""
        return self._indexes(TrainableDrafter)

    def _indexes(self, kind: type[Any]) -> list[int]:
        return [index for index, source in enumerate(self._sources) if isinstance(source, kind)]

    @property
    def max_nodes(self) -> int:
        return self.config.tree_nodes

    @property
    def tree_sizes(self) -> Sequence[int]:
        """Return the sizes of trees with `few_sizes`."""
        return (self.max_nodes,) if self.config.pace == "fixed" else widths_up_to(self.max_nodes)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._all_layers

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and answer together; None if the target's limit suffices."""
        lengths = [source.context_length for source in self.sources.values() if source.context_length is not None]
        return min(lengths, default=None)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the trained weights of all sources."""
        for source in self.sources.values():
            yield from source.parameters()

    # --- decoding: see `Drafter`

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> MergedState:
        batch = len(prompts.lengths)
        if self.config.pace == "expected":
            self._pacer(batch, begins=True)
        return MergedState(
            sources=tuple(
                source.init_state(prompts, self._output_for(index, prefill), max_new_tokens=max_new_tokens)
                for index, source in enumerate(self._sources)
            ),
            texts=tuple(MergedText(counts=start_of_text(self.counts)) for _ in range(batch)),
            num_accepted=(0,) * batch,
        )

    def propose(
        self, state: MergedState, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, MergedDraft]:
        last_tokens = last_token.tolist() if state.last_tokens is None else state.last_tokens
        started = self.clock()
        # 1. Learn from the last tokens, and continue the trees that grow.
        draft = self.open(state, last_token, last_tokens)
        # 2. Ask the sources, merge their candidates, and choose the number of nodes.
        if self.config.pace == "fixed":
            for index in range(len(self._sources)):
                self.ask(draft, index)
            self.merge(draft)
            num_nodes = self.max_nodes
        else:
            draft.pacer = self._pacer(len(last_tokens))
            num_nodes = self._paced(draft, draft.pacer)
        expected = expected_tokens(draft.rows)
        draft.expected = expected[min(num_nodes, len(expected) - 1)]
        # 3. Make the tree.
        draft.drafted_at = self.clock()
        draft.draft_seconds = draft.drafted_at - started
        return self._tree(draft.rows, num_nodes, last_token.device), draft

    def meanwhile(self, drafted: MergedDraft) -> Meanwhile | None:
        """Return what lets the tree of one row grow while the pass waits."""
        return partial(self._grow_on, drafted) if drafted.grown and len(drafted.rows) == 1 else None

    def advance(self, drafted: MergedDraft, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> MergedState:
        # 1. The sources' states.
        states = tuple(
            source.advance(self._drafted(drafted, index), tree, accepted, self._output_for(index, output))
            for index, source in enumerate(self._sources)
        )
        # 2. Learn which tokens were accepted. The token after the last one comes with `propose`.
        texts = drafted.state.texts
        for text, row, tokens in zip(texts, drafted.rows, accepted.tokens, strict=True):
            text.walks = (*text.walks, (row, NO_NODE))
            text.follow(tokens, self.counts)
        # 3. Learn what the step took.
        num_accepted = accepted.num_accepted.host
        if (pacer := drafted.pacer) is not None:
            tokens_per_row = 1 + sum(num_accepted) / len(num_accepted)
            seconds = self.clock() - drafted.drafted_at
            pacer.add_step(tree.num_nodes, tokens_per_row, drafted.expected, drafted.draft_seconds, seconds)
            learn_gains(pacer, drafted.asked, accepted.new_tokens, num_accepted)
        return MergedState(sources=states, texts=texts, num_accepted=num_accepted, last_tokens=accepted.next_tokens)

    def select(self, state: MergedState, rows: Sequence[int]) -> MergedState:
        return MergedState(
            sources=tuple(source.select(part, rows) for source, part in zip(self._sources, state.sources, strict=True)),
            texts=tuple(replace(state.texts[row], counts={**state.texts[row].counts}) for row in rows),  # a row may be repeated
            num_accepted=tuple(state.num_accepted[row] for row in rows),
            last_tokens=state.last_tokens and tuple(state.last_tokens[row] for row in rows),
        )

    def recorded(self, record: Callable[[Source], Any]) -> "MergedDrafter":
        """Return a drafter whose sources are recorded; both measure the same seconds."""
        other = copy(self)
        other._sources = tuple(map(record, self._sources))
        return other

    # --- drafting

    def open(self, state: MergedState, last_token: Int[torch.Tensor, " batch"], last_tokens: Sequence[int]) -> MergedDraft:
        """Learn from the last tokens, and return what is left of the trees of growing models."""
        for text, token in zip(state.texts, last_tokens, strict=True):
            text.follow([token], self.counts)
        draft = MergedDraft(state=state, last_token=last_token, last_tokens=last_tokens, proposals=[[] for _ in last_tokens])
        for index in self._models:
            part = state.sources[index]
            self._sources[index].open(part, last_tokens)
            draft.grown[index] = [Proposals(index) for _ in last_tokens]
            for row, proposals in zip(draft.proposals, draft.grown[index], strict=True):
                row.append(proposals)
            self._take_nodes(draft, index)
        return draft

    def ask(self, draft: MergedDraft, index: int) -> None:
        """Let a source draft; of a growing model this is a pass that reads the root."""
        source, state = self._sources[index], draft.state.sources[index]
        if index in draft.grown:
            self.read(draft, index, [[NO_NODE]] * len(draft.rows))
            return
        if not isinstance(source, TrainingFreeDrafter):
            search, draft.drafted[index] = source.search(state, draft.last_token)
            candidates = rows_of_search(search, self.max_nodes)
        else:
            draft.drafted[index] = TextState(state, draft.last_tokens)
            candidates = source.candidates(state, draft.last_tokens)
        for row, row_candidates in zip(draft.proposals, candidates, strict=True):
            if row_candidates.tokens:
                row.append(Proposals(index, row_candidates))

    def read(self, draft: MergedDraft, index: int, reads: Sequence[Sequence[int]]) -> None:
        """Let a growing model read some nodes of each row's merged tree; NO_NODE is the root.

        Nodes that other sources have proposed join the model's tree.
        """
        part: GrowingText = draft.state.sources[index]
        numbers = [
            [number for node in nodes if (number := _number(row, merged, proposals, node)) is not None]
            for row, merged, proposals, nodes in zip(part.rows, draft.rows, draft.grown[index], reads, strict=True)
        ]
        if any(numbers):
            self._sources[index].read(part, numbers)
        self._take_nodes(draft, index)

    def unread(self, draft: MergedDraft, index: int, most: int = MAX_READS) -> list[list[int]]:
        """Return each row's nodes that a growing model may read next, the likeliest first.

        The model has read their parents. They are `most` at most, and none if its cache has no room.
        """
        part: GrowingText = draft.state.sources[index]
        if not part.is_rooted:
            return [[NO_NODE] for _ in draft.rows]
        if self._sources[index].room(part) < MAX_READS:
            return [[] for _ in draft.rows]
        found = []
        for row, merged, proposals in zip(part.rows, draft.rows, draft.grown[index], strict=True):
            entries, nodes = row.tree.entries, []
            is_read = {NO_NODE: True}
            for node, parent in enumerate(merged.parents):
                number = merged.number(node, proposals)
                is_read[node] = number is not None and entries[number] != UNREAD
                if is_read[parent] and not is_read[node]:
                    nodes.append(node)
                    if len(nodes) == most:
                        break
            found.append(nodes)
        return found

    def merge(self, draft: MergedDraft, floors: Sequence[float] | None = None) -> None:
        """Merge the candidates so far, row by row."""
        draft.rows = tuple(
            grow(proposals, text.counts, self.max_nodes, floors)
            for proposals, text in zip(draft.proposals, draft.state.texts, strict=True)
        )

    def _paced(self, draft: MergedDraft, pacer: Pacer) -> int:
        """Merge the candidates of the sources that are worth their time; return how many nodes to verify.

        The groups of sources are asked one after another, each only if it is worth its time.
        """
        floors = None if pacer.is_trial else pacer.floors()
        self.merge(draft, floors)
        gains = pacer.trusted(expected_tokens(draft.rows))
        accepted = bisect(ACCEPTED_BOUNDS, sum(draft.state.num_accepted) / len(draft.last_tokens))
        for group, indexes in enumerate(self._groups):
            before, rows_before = gains, draft.rows
            if not self._has_root(draft, indexes[0]):
                # 1. Skip a group that costs more than it is expected to gain.
                situation = (accepted, bisect(EXPECTED_BOUNDS, gains[-1] - 1))
                if not pacer.is_trial and not pacer.is_worth(group, situation):
                    continue
                # 2. Merge its candidates; a growing model reads the root.
                started = self.clock()
                for index in indexes:
                    self.ask(draft, index)
                self.merge(draft, floors)
                gains = pacer.trusted(expected_tokens(draft.rows))
                pacer.add_draft(group, self.clock() - started)
                # 3. Learn what it is expected to add.
                if not pacer.is_trial:
                    pacer.add_gain(group, situation, before, gains)
            if not pacer.is_trial:
                if indexes[0] in draft.grown:
                    gains = self._grow(draft, group, pacer, floors)
                draft.asked.append(Asked(group, rows_before, pacer.best(before)[0], pacer.added(before, gains)[0]))
        return pacer.width(gains)

    def _has_root(self, draft: MergedDraft, index: int) -> bool:
        """Return whether a growing model has read the last token already: its tree is what the last step has left."""
        return index in draft.grown and draft.state.sources[index].is_rooted

    def _grow(self, draft: MergedDraft, group: int, pacer: Pacer, floors: Sequence[float] | None) -> list[float]:
        """Let a model read nodes as long as a pass is worth its time; return the expected tokens then."""
        (index,) = self._groups[group]
        gains = pacer.trusted(expected_tokens(draft.rows))
        while any(reads := self.unread(draft, index)):
            # 1. The number of nodes whose children are expected to add most.
            probs = [[merged.prob(node) for node in row] for merged, row in zip(draft.rows, reads, strict=True)]
            count = pacer.num_reads(group, probs)
            if not count:
                break
            # 2. Read them.
            before, started = gains, self.clock()
            self.read(draft, index, [row[:count] for row in reads])
            seconds = self.clock() - started
            self.merge(draft, floors)
            gains = pacer.trusted(expected_tokens(draft.rows))
            # 3. Learn what that took, and what the children add.
            pacer.add_read(group, [row[:count] for row in probs], seconds, before, gains)
        return gains

    def _grow_on(self, draft: MergedDraft, seconds: float) -> bool:
        """Let a model read some nodes if that fits the wait; return whether one did."""
        for index in draft.grown:
            (nodes,) = self.unread(draft, index)
            nodes = [node for node in nodes if draft.rows[0].prob(node) >= LEAST_PROB]
            if nodes and self._pacer(1).longest_read(self._groups.index([index])) <= seconds:
                self.read(draft, index, [nodes])
                self.merge(draft)
                return True
        return False

    def _take_nodes(self, draft: MergedDraft, index: int) -> None:
        """Append what a growing model's trees have got since to its proposals."""
        part: GrowingText = draft.state.sources[index]
        for row, proposals in zip(part.rows, draft.grown[index], strict=True):
            tree = row.tree
            for node in range(len(proposals.tokens), len(tree)):
                score = tree.estimates[node]
                parent = tree.parents[node] if score > 0.0 else FOREIGN
                proposals.add(parent, tree.tokens[node], score, bisect(BIN_BOUNDS, score))

    def _drafted(self, draft: MergedDraft, index: int) -> Any:
        """Return what a source needs to advance. One that wasn't asked follows the text without drafts."""
        source, state = self._sources[index], draft.state.sources[index]
        if index in draft.drafted or index in draft.grown:
            return draft.drafted.get(index, state)
        if isinstance(source, TrainingFreeDrafter):
            return TextState(state, draft.last_tokens)
        return source.skip(state, draft.last_token)

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
        first = [row.first(num_nodes) for row in rows]
        if not self.few_sizes:
            return tree_of(first, device, origins=origins)
        size = self.tree_sizes[bisect_left(self.tree_sizes, max(len(row.tokens) for row in first))]
        depth = max((max(row.depths[:num_nodes], default=0) for row in rows), default=0)
        return tree_of(first, device, num_nodes=size, max_depth=-(-depth // DEPTH_STEP) * DEPTH_STEP, origins=origins)

    def _output_for(self, index: int, output: TargetOutput) -> TargetOutput:
        """Return the target's output with the features that this source reads."""
        layers, all_layers = self._layers[index], self._all_layers
        if output.features is None or layers in ((), all_layers):
            return output
        parts = output.features.chunk(len(all_layers), dim=-1)
        return replace(output, features=torch.cat([parts[all_layers.index(layer)] for layer in layers], dim=-1))


def require_mergeable(configs: Mapping[str, Any], vocab_sizes: Mapping[str, int]) -> None:
    """Raise ValueError for drafters whose candidates can't form one tree.

    `configs` are theirs by name, and `vocab_sizes` those of the trained ones.
    """
    if not 1 <= len(configs) <= MAX_SOURCES:
        raise ValueError(f"a merged tree of {len(configs)} drafters; name between 1 and {MAX_SOURCES}")
    for name, config in configs.items():
        if temperature := getattr(config, "temperature", 0.0):
            raise ValueError(
                f"{name} draws its drafts at temperature {temperature:g}, and the acceptance of drawn drafts needs their "
                f"probabilities, which a merged tree doesn't have; set its temperature to 0, or decode without {name}"
            )
    if len(set(vocab_sizes.values())) > 1:
        listed = ", ".join(f"{size:,} tokens in {name}" for name, size in vocab_sizes.items())
        raise ValueError(f"the drafters of a merge have different vocabularies ({listed}); merge drafters of one target")


def expected_tokens(rows: Sequence[MergedRow]) -> list[float]:
    """Return the tokens that a row emits on average with the n likeliest nodes, n = 0, 1, ..."""
    return mean_sums([row.probs for row in rows], initial=1.0)


def _number(row: GrowingRow, merged: MergedRow, proposals: Proposals, node: int) -> int | None:
    """Return a merged node's number in a model's tree, where it joins; None if it was read there below an earlier root."""
    number = merged.number(node, proposals)
    if number is None:
        above = merged.number(merged.parents[node], proposals)
        assert above is not None, "a node is read after its parent"
        number = row.adopt(above, merged.tokens[node])
        source, place = merged.places[node][0]
        source.attached.setdefault(place, []).append((proposals, number))
    return number if number == NO_NODE or row.tree.entries[number] == UNREAD else None


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
