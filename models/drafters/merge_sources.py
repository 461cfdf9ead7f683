"""The sources of a merged tree: what they propose, and how they follow the text.

There are three kinds. A training-free drafter looks its candidates up. A trained one searches once a
step. And a draft model may grow (see `growing_draft`): each of its passes reads the likeliest nodes
of the merged tree, whichever source has proposed them.

    the text    a b c
    suffix      d e f             tree   d ─┬─ e ─── f ─── g     g: the draft model has read f,
    model       d x                         └─ x                    which only suffix proposed
"""

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int

from ..decoding.growing_tree import UNREAD
from ..decoding.pacing import MAX_READS
from ..decoding.sampling import Randomness, RowSeeds
from ..decoding.tree import DraftTree, depths_of
from ..decoding.types import NO_NODE, AcceptedPath, Prompts, TargetOutput
from .base import TrainableDrafter
from .calibration import BIN_BOUNDS, MAX_SOURCES, OutcomeCounts, start_of_text
from .growing_draft import GrowingModel, GrowingRow, GrowingText
from .merging import MAX_WALKS, MergedRow, MergeWalk, Proposals, follow, merge_row, odds_of_ring, rows_of_search
from .training_free import Candidates, FreeState, TrainingFreeDrafter, each_once

FOREIGN = -2
"""Parent of a node in a growing model's proposals, if it isn't the model's own candidate."""

Source = TrainableDrafter | TrainingFreeDrafter


@dataclass(slots=True, kw_only=True)
class MergedText:
    """What a merge knows of one row's text. It changes as the text goes on."""

    counts: OutcomeCounts
    """The calibration of this text."""
    walks: tuple[MergeWalk, ...] = ()
    """The merged rows that the text has followed so far, up to its last accepted token."""

    def follow(self, tokens: Sequence[int], *counts: OutcomeCounts) -> None:
        """Learn from the tokens that the target has chosen."""
        for token in tokens:
            self.walks = follow(self.walks[-MAX_WALKS:], token, self.counts, *counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedState:
    """The states of the sources, and what each row's text has shown."""

    states: tuple[Any, ...]
    """One for each source, in their order."""
    texts: tuple[MergedText, ...]
    num_accepted: tuple[int, ...]
    """Accepted draft tokens of the last step."""
    last_tokens: tuple[int, ...] | None = None
    """The last token of each row; None if the host hasn't read it yet."""


@dataclass(slots=True, kw_only=True)
class MergedDraft:
    """A merged tree in the making, and what `advance` needs of it."""

    state: MergedState
    last_token: Int[torch.Tensor, " batch"]
    last_tokens: Sequence[int]
    generator: Randomness = None
    """The target's random numbers, which may show its draws."""
    drafted: dict[int, Any] = field(default_factory=dict)
    """What each trained source that was asked needs to advance, by its index."""
    proposals: list[list[Proposals]]
    """The candidates so far, by row."""
    grown: dict[int, list[Proposals]] = field(default_factory=dict)
    """Those of the growing models, by the model's index; a node has the same number in the
    model's own tree."""
    rows: tuple[MergedRow, ...] = ()
    """The merged trees of the last `rank`, which comes before the first `read`."""


class MergeSources:
    """The sources of a merge, and the calibration that all its texts teach.

    With `grows`, draft models grow, unless their passes have fixed shapes. The trees are chains with `is_chain`.
    """

    def __init__(self, sources: Mapping[str, Source], *, max_nodes: int, grows: bool, is_chain: bool = False) -> None:
        """Raises ValueError for sources that can't be merged."""
        vocab_sizes = {name: source.vocab_size for name, source in sources.items() if isinstance(source, TrainableDrafter)}
        require_mergeable(len(sources), vocab_sizes)
        self.named, self.max_nodes, self.is_chain = dict(sources), max_nodes, is_chain
        self.counts: OutcomeCounts = {}
        self.sources: tuple[Any, ...] = tuple(
            (grows and isinstance(source, TrainableDrafter) and source.growing()) or source for source in sources.values()
        )
        self.free, self.searching, self.models = map(self._indexes, (TrainingFreeDrafter, TrainableDrafter, GrowingModel))
        self._layers = tuple(source.feature_layers for source in sources.values())
        self.feature_layers = tuple(sorted({layer for layers in self._layers for layer in layers}))

    def _indexes(self, kind: type[Any]) -> list[int]:
        return [index for index, source in enumerate(self.sources) if isinstance(source, kind)]

    def recorded(self, record: Callable[[Source], Any]) -> "MergeSources":
        """Return the same sources, recorded."""
        other = copy(self)
        other.sources = tuple(map(record, self.sources))
        return other

    # --- following the text

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> MergedState:
        """Return the state after the prompts."""
        batch = len(prompts.lengths)
        return MergedState(
            states=tuple(
                source.init_state(prompts, self._output_for(index, prefill), max_new_tokens=max_new_tokens)
                for index, source in enumerate(self.sources)
            ),
            texts=tuple(MergedText(counts=start_of_text(self.counts)) for _ in range(batch)),
            num_accepted=(0,) * batch,
        )

    def advance(self, drafted: MergedDraft, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> MergedState:
        """Return the state after the accepted path. The token after it comes with the next draft."""
        states = tuple(
            source.advance(self._drafted(drafted, index), tree, accepted, self._output_for(index, output))
            for index, source in enumerate(self.sources)
        )
        texts = drafted.state.texts
        for text, row, tokens in each_once(zip(texts, drafted.rows, accepted.tokens, strict=True)):
            text.walks = (*text.walks, (row, NO_NODE))
            text.follow(tokens, self.counts)
        return MergedState(
            states=states, texts=texts, num_accepted=accepted.num_accepted.host, last_tokens=accepted.next_tokens
        )

    def select(self, state: MergedState, rows: Sequence[int]) -> MergedState:
        """Return the state of these rows of the batch only."""
        return MergedState(
            states=tuple(source.select(own, rows) for source, own in zip(self.sources, state.states, strict=True)),
            texts=tuple(state.texts[row] for row in rows),
            num_accepted=tuple(state.num_accepted[row] for row in rows),
            last_tokens=state.last_tokens and tuple(state.last_tokens[row] for row in rows),
        )

    def _drafted(self, draft: MergedDraft, index: int) -> Any:
        """Return what a source needs to advance. One that wasn't asked follows the text without drafts."""
        source, state = self.sources[index], draft.state.states[index]
        if index in draft.drafted or index in draft.grown:
            return draft.drafted.get(index, state)
        if isinstance(source, TrainingFreeDrafter):
            return FreeState(state.stores, draft.last_tokens)
        return source.skip(state, draft.last_token)

    def _output_for(self, index: int, output: TargetOutput) -> TargetOutput:
        """Return the target's output with the features that this source reads."""
        layers, all_layers = self._layers[index], self.feature_layers
        if output.features is None or layers in ((), all_layers):
            return output
        parts = output.features.chunk(len(all_layers), dim=-1)
        return replace(output, features=torch.cat([parts[all_layers.index(layer)] for layer in layers], dim=-1))

    # --- drafting

    def open(
        self,
        state: MergedState,
        last_token: Int[torch.Tensor, " batch"],
        last_tokens: Sequence[int],
        generator: Randomness = None,
    ) -> MergedDraft:
        """Learn from the last tokens, and return what is left of the trees of growing models."""
        for text, token in each_once(zip(state.texts, last_tokens, strict=True)):
            text.follow([token], self.counts)
        draft = MergedDraft(
            state=state,
            last_token=last_token,
            last_tokens=last_tokens,
            proposals=[[] for _ in last_tokens],
            generator=generator,
        )
        for index in self.models:
            self.sources[index].open(state.states[index], last_tokens, generator)
            draft.grown[index] = [Proposals(index) for _ in last_tokens]
            for row, proposals in zip(draft.proposals, draft.grown[index], strict=True):
                row.append(proposals)
            self._take_nodes(draft, index)
        return draft

    def ask(self, draft: MergedDraft, index: int) -> None:
        """Let a source draft; of a growing model this is a pass that reads the root. Raises ValueError for NaN."""
        source, state = self.sources[index], draft.state.states[index]
        if index in draft.grown:
            self.read(draft, index, [[NO_NODE]] * len(draft.rows))
            return
        if not isinstance(source, TrainingFreeDrafter):
            search, draft.drafted[index] = source.search(state, draft.last_token, generator=draft.generator)
            candidates = rows_of_search(search, self.max_nodes)
        else:
            candidates = source.candidates(state, draft.last_tokens)
        for row, (proposals, found) in enumerate(zip(draft.proposals, candidates, strict=True)):
            if found.tokens:
                looked_up = isinstance(source, TrainingFreeDrafter)
                proposals.append(Proposals(index, found, odds_of_draws(draft.generator, row, found) if looked_up else None))

    def read(self, draft: MergedDraft, index: int, reads: Sequence[Sequence[int]]) -> bool:
        """Let a growing model read some nodes of each row's merged tree; NO_NODE is the root.

        Nodes that other sources have proposed join the model's tree. Returns whether it took a pass:
        nodes that the model has read below an earlier root need none. Raises ValueError for NaN.
        """
        state: GrowingText = draft.state.states[index]
        numbers = [
            [number for node in nodes if (number := _joined(row, merged, proposals, node)) is not None]
            for row, merged, proposals, nodes in zip(state.rows, draft.rows, draft.grown[index], reads, strict=True)
        ]
        takes_pass = any(numbers)
        if takes_pass:
            self.sources[index].read(state, numbers, draft.generator)
        self._take_nodes(draft, index)
        return takes_pass

    def unread(self, draft: MergedDraft, index: int, most: int = MAX_READS) -> list[list[int]]:
        """Return each row's nodes that a growing model may read next, the likeliest first.

        The model has read their parents. Each row has at most `most`, and none if the cache has no room.
        """
        state: GrowingText = draft.state.states[index]
        if not state.is_rooted:
            return [[NO_NODE] for _ in draft.rows]
        if self.sources[index].room(state) < MAX_READS:
            return [[] for _ in draft.rows]
        found = []
        for row, merged, proposals in zip(state.rows, draft.rows, draft.grown[index], strict=True):
            entries, nodes = row.tree.cache_entries, []
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

    def rank(self, draft: MergedDraft, floors: Sequence[float] | None = None) -> None:
        """Merge the candidates so far, row by row, into the likeliest nodes: each tree anew."""
        draft.rows = tuple(
            merge_row(proposals, text.counts, self.max_nodes, floors, is_chain=self.is_chain)
            for proposals, text in zip(draft.proposals, draft.state.texts, strict=True)
        )

    def _take_nodes(self, draft: MergedDraft, index: int) -> None:
        """Append what a growing model's trees have got since to its proposals."""
        state: GrowingText = draft.state.states[index]
        for row, proposals in zip(state.rows, draft.grown[index], strict=True):
            tree = row.tree
            for node in range(len(proposals.tokens), len(tree)):
                score = tree.estimates[node]
                parent = tree.parents[node] if score > 0.0 else FOREIGN  # 0 marks what other sources proposed
                # A greedy target accepts the likeliest token far more often than its probability: it has bins of its own.
                is_first = tree.children(tree.parents[node])[0] == node
                bin_index = bisect(BIN_BOUNDS, score) + is_first * (1 + len(BIN_BOUNDS))
                proposals.add(parent, tree.tokens[node], score, bin_index)


def odds_of_draws(generator: Randomness, row: int, candidates: Candidates, depth: int = 0) -> list[float] | None:
    """Return what the clocks of a row's candidates say (see `odds_of_ring`); None if the draws aren't shown.

    `depth` is that of the node that they follow.
    """
    if not isinstance(generator, RowSeeds) or generator.sampling is None:
        return None
    rings = generator.rings(row, [depth + below - 1 for below in depths_of(candidates.parents)], candidates.tokens)
    return [odds_of_ring(ring, generator.sampling.temperature) for ring in rings]


def _joined(row: GrowingRow, merged: MergedRow, proposals: Proposals, node: int) -> int | None:
    """Let a merged node join a model's tree, and return its number there; None if it was read below an earlier root."""
    number = merged.number(node, proposals)
    if number is None:
        above = merged.number(merged.parents[node], proposals)
        assert above is not None, "a node is read after its parent"
        number = row.adopt(above, merged.tokens[node])
        source, place = merged.places[node][0]
        source.attached.setdefault(place, []).append((proposals, number))
    return number if number == NO_NODE or row.tree.cache_entries[number] == UNREAD else None


def require_mergeable(num_sources: int, vocab_sizes: Mapping[str, int]) -> None:
    """Raise ValueError for drafters whose candidates can't form one tree; `vocab_sizes` are those of the trained ones."""
    if not 1 <= num_sources <= MAX_SOURCES:
        raise ValueError(f"a merged tree of {num_sources} drafters; name between 1 and {MAX_SOURCES}")
    if len(set(vocab_sizes.values())) > 1:
        listed = ", ".join(f"{size:,} tokens in {name}" for name, size in vocab_sizes.items())
        raise ValueError(f"the drafters of a merge have different vocabularies ({listed}); merge drafters of one target")
