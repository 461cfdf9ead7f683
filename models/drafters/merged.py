"""One draft tree of several drafters, and how much of it is drafted and verified at each step.

The sources' candidates are merged into one tree (see `merging`), whose nodes are ranked by their
calibrated probability of acceptance (see `calibration`). With `pace: fixed` the tree has the
`tree_nodes` likeliest nodes. With `pace: expected` each step decides which sources it asks and how
many nodes it verifies, by what they are expected to gain and what they cost (see `pacing`).

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
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import torch
from jaxtyping import Int
from pydantic.dataclasses import dataclass as options

from ...data.fields import OPTIONS, PositiveInt, one_of
from ..decoding.pacing import Pacer, widths_up_to
from ..decoding.protocols import Drafter, Meanwhile
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE, AcceptedPath, Prompts, TargetOutput
from .base import TrainableDrafter
from .calibration import MAX_SOURCES, OutcomeCounts, start_of_text
from .candidates import tree_of
from .merging import MergedRow, MergeWalk, Proposals, follow, grow, rows_of_search
from .training_free import TextState, TrainingFreeDrafter

PACES = ("expected", "fixed")

EXPECTED_BOUNDS = (0.1, 0.3, 0.6, 1.0, 1.5, 2.5)
"""Bounds of what the sources asked before expect, in draft tokens: gains are counted by it."""
ACCEPTED_BOUNDS = (0.5, 1.5, 3.5)
"""Bounds of the draft tokens accepted in the step before: gains are counted by it, too."""
DEPTH_STEP = 8
"""Trees of few sizes have a multiple of this as the bound of their depth."""

Source = TrainableDrafter | TrainingFreeDrafter


@options(kw_only=True, config=OPTIONS)
class MergedConfig:
    """Options of merged trees."""

    tree_nodes: PositiveInt = 40
    """Most nodes of the merged tree, of all sources together."""
    pace: Annotated[str, one_of(*PACES)] = "expected"
    """`expected`: each step decides which sources draft and how many nodes are verified, by the
    expected gain in time. `fixed`: every source drafts at each step, and the `tree_nodes` likeliest
    nodes are verified, so the same texts give the same tokens per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedState:
    """The states of the sources, and what each row's text has followed."""

    sources: tuple[Any, ...]
    counts: tuple[OutcomeCounts, ...]
    """The calibration of each row's text."""
    walks: tuple[tuple[MergeWalk, ...], ...]
    """The proposals that each row's text has followed so far, up to its last accepted token."""
    num_accepted: tuple[int, ...]
    """Accepted draft tokens of the last step."""
    last_tokens: tuple[int, ...] | None = None
    """The last token of each row; None if the host hasn't read it yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedDraft:
    """What `advance` needs of a proposal."""

    drafted: tuple[Any, ...]
    counts: tuple[OutcomeCounts, ...]
    walks: tuple[tuple[MergeWalk, ...], ...]
    """The proposals that the text has followed up to its last token, this one included."""
    expected: float
    """Tokens that the step is expected to emit in each row."""
    asked: tuple["Asked", ...]
    """The groups of sources that were asked, in order, if the tree is paced."""
    draft_seconds: float
    drafted_at: float
    """The clock when the tree was begun: its size costs time from here on."""


class Asked(NamedTuple):
    """A group of sources that was asked, and the tree that there would have been without it."""

    group: int
    rows: tuple[MergedRow, ...]
    num_nodes: int
    expected: float
    """Tokens that the group is expected to add to the step."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """A proposal in the making."""

    state: MergedState
    last_token: Int[torch.Tensor, " batch"]
    last_tokens: Sequence[int]
    drafted: dict[int, Any] = field(default_factory=dict)
    """What each source needs to advance, by its index."""
    proposals: list[list[Proposals]]
    """The candidates so far, by row."""
    asked: list[Asked] = field(default_factory=list)


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
        self._sources: tuple[Any, ...] = tuple(sources.values())
        self.counts: OutcomeCounts = {}
        self._layers = tuple(source.feature_layers for source in self._sources)
        self._all_layers = tuple(sorted({layer for layers in self._layers for layer in layers}))
        # Sources are asked in groups: all training-free ones first, which cost little.
        trained = [index for index, source in enumerate(self._sources) if isinstance(source, TrainableDrafter)]
        free = [index for index in range(len(self._sources)) if index not in trained]
        self._groups = [group for group in (free, *([index] for index in trained)) if group]
        self._pacers: dict[int, Pacer] = {}

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
            counts=tuple(start_of_text(self.counts) for _ in range(batch)),
            walks=((),) * batch,
            num_accepted=(0,) * batch,
        )

    def propose(
        self, state: MergedState, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, MergedDraft]:
        # 1. Learn from the tokens that the target chose after the last trees.
        last_tokens = last_token.tolist() if state.last_tokens is None else state.last_tokens
        started = self.clock()
        walks = self._followed(state.walks, [[token] for token in last_tokens], state.counts)
        draft = Draft(state=state, last_token=last_token, last_tokens=last_tokens, proposals=[[] for _ in last_tokens])
        # 2. Ask the sources, merge their candidates, and choose the number of nodes.
        if self.config.pace == "fixed":
            for index in range(len(self._sources)):
                self._ask(draft, index)
            rows, num_nodes = self._merged(draft), self.max_nodes
        else:
            rows, num_nodes = self._paced(draft, self._pacer(len(last_tokens)))
        expected = expected_tokens(rows)
        # 3. Make the tree.
        drafted_at = self.clock()
        return self._tree(rows, num_nodes, last_token.device), MergedDraft(
            drafted=tuple(draft.drafted[index] for index in range(len(self._sources))),
            counts=state.counts,
            walks=tuple((*before, (row, NO_NODE)) for before, row in zip(walks, rows, strict=True)),
            expected=expected[min(num_nodes, len(expected) - 1)],
            asked=tuple(draft.asked),
            draft_seconds=drafted_at - started,
            drafted_at=drafted_at,
        )

    def meanwhile(self, drafted: MergedDraft) -> Meanwhile | None:
        """Return what the sources do meanwhile: the next one if those before have nothing to do."""
        works = [source.meanwhile(part) for source, part in zip(self._sources, drafted.drafted, strict=True)]
        works = [work for work in works if work is not None]
        return (lambda seconds: any(work(seconds) for work in works if work is not None)) if works else None

    def advance(self, drafted: MergedDraft, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> MergedState:
        # 1. The sources' states.
        states = tuple(
            source.advance(drafted.drafted[index], tree, accepted, self._output_for(index, output))
            for index, source in enumerate(self._sources)
        )
        # 2. Learn which tokens were accepted. The token after the last one comes with `propose`.
        walks = self._followed(drafted.walks, accepted.tokens, drafted.counts)
        # 3. Learn what the step took.
        num_accepted = accepted.num_accepted.host
        if self.config.pace == "expected":
            tokens_per_row = 1 + sum(num_accepted) / len(num_accepted)
            seconds = self.clock() - drafted.drafted_at
            pacer = self._pacer(len(num_accepted))
            pacer.add_step(tree.num_nodes, tokens_per_row, drafted.expected, drafted.draft_seconds, seconds)
            learn_gains(pacer, drafted.asked, accepted.new_tokens, num_accepted)
        return MergedState(
            sources=states, counts=drafted.counts, walks=walks, num_accepted=num_accepted, last_tokens=accepted.next_tokens
        )

    def select(self, state: MergedState, rows: Sequence[int]) -> MergedState:
        return MergedState(
            sources=tuple(source.select(part, rows) for source, part in zip(self._sources, state.sources, strict=True)),
            counts=tuple(dict(state.counts[row]) for row in rows),  # a row may be repeated
            walks=tuple(state.walks[row] for row in rows),
            num_accepted=tuple(state.num_accepted[row] for row in rows),
            last_tokens=state.last_tokens and tuple(state.last_tokens[row] for row in rows),
        )

    def recorded(self, record: Callable[[Source], Any]) -> "MergedDrafter":
        """Return a drafter whose sources are recorded; both measure the same seconds."""
        other = copy(self)
        other._sources = tuple(map(record, self._sources))
        return other

    # --- drafting

    def _paced(self, draft: Draft, pacer: Pacer) -> tuple[tuple[MergedRow, ...], int]:
        """Return the merged rows, and the number of nodes to verify, as the pacer chooses.

        The groups of sources are asked one after another, each only if it is worth its time.
        """
        floors = None if pacer.is_trial else pacer.floors()
        rows = self._merged(draft, floors)
        gains = pacer.trusted(expected_tokens(rows))
        accepted = bisect(ACCEPTED_BOUNDS, sum(draft.state.num_accepted) / len(draft.last_tokens))
        for group, indexes in enumerate(self._groups):
            # 1. Skip a group that costs more than it is expected to gain.
            situation = (accepted, bisect(EXPECTED_BOUNDS, gains[-1] - 1))
            if not pacer.is_trial and not pacer.is_worth(group, situation):
                for index in indexes:
                    self._skip(draft, index)
                continue
            # 2. Merge its candidates.
            started = self.clock()
            for index in indexes:
                self._ask(draft, index)
            before, rows_before = gains, rows
            rows = self._merged(draft, floors)
            gains = pacer.trusted(expected_tokens(rows))
            pacer.draft[group].add(self.clock() - started)
            # 3. Learn what it is expected to add.
            if not pacer.is_trial:
                expected = pacer.add_gain(group, situation, before, gains)
                draft.asked.append(Asked(group, rows_before, pacer.best(before)[0], expected))
        return rows, pacer.width(gains)

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

    def _ask(self, draft: Draft, index: int) -> None:
        """Let a source draft."""
        source, state = self._sources[index], draft.state.sources[index]
        if not isinstance(source, TrainingFreeDrafter):
            search, draft.drafted[index] = source.search(state, draft.last_token)
            candidates = rows_of_search(search, self.max_nodes)
        else:
            draft.drafted[index] = TextState(state, draft.last_tokens)
            candidates = source.candidates(state, draft.last_tokens)
        for row, row_candidates in zip(draft.proposals, candidates, strict=True):
            if row_candidates.tokens:
                row.append(Proposals(index, row_candidates))

    def _skip(self, draft: Draft, index: int) -> None:
        """Let a source's state follow the text without drafts."""
        source, state = self._sources[index], draft.state.sources[index]
        if not isinstance(source, TrainingFreeDrafter):
            draft.drafted[index] = source.skip(state, draft.last_token)
        else:
            draft.drafted[index] = TextState(state, draft.last_tokens)

    def _merged(self, draft: Draft, floors: Sequence[float] | None = None) -> tuple[MergedRow, ...]:
        """Merge the candidates so far, row by row."""
        return tuple(
            grow(proposals, counts, self.max_nodes, floors)
            for proposals, counts in zip(draft.proposals, draft.state.counts, strict=True)
        )

    def _followed(
        self, walks: Sequence[tuple[MergeWalk, ...]], tokens: Sequence[Sequence[int]], counts: Sequence[OutcomeCounts]
    ) -> tuple[tuple[MergeWalk, ...], ...]:
        """Return each row's proposals after these tokens of its text, and learn from them."""
        followed = []
        for row_walks, row_tokens, row_counts in zip(walks, tokens, counts, strict=True):
            for token in row_tokens:
                row_walks = follow(row_walks, token, row_counts, self.counts)
            followed.append(row_walks)
        return tuple(followed)

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
    sums = [list(accumulate(row.probs, initial=1.0)) for row in rows]
    if len(sums) == 1:
        return sums[0]
    longest = max(map(len, sums))
    return [sum(row[min(n, len(row) - 1)] for row in sums) / len(sums) for n in range(longest)]


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
