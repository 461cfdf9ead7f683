"""One draft tree of several drafters, and how much of it is drafted and verified at each step.

The sources' candidates are merged into one tree (see `merging`), whose nodes are ranked by their
calibrated probability of acceptance (see `calibration`). With `pace: fixed` the tree has the
`tree_nodes` likeliest nodes. With `pace: expected` each step decides which sources it asks and how
many nodes it verifies, by what they are expected to gain and what they cost (see `pacing`).

The trees depend on the text, and with `pace: expected` on the clock, but never on random numbers.
So the tokens are those of plain decoding, greedy or sampled, whatever the clock shows.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from jaxtyping import Int
from pydantic.dataclasses import dataclass as options

from ...data.fields import OPTIONS, PositiveInt, one_of
from ..decoding.prompts import Prompts
from ..decoding.protocols import Drafter
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE, AcceptedPath, TargetOutput
from .base import TrainableDrafter
from .calibration import MAX_SOURCES, Counts, Prior
from .candidates import NO_CANDIDATES, Candidates, tree_of
from .merging import Child, MergedRow, Proposals, grow, rows_of_search, teach_children
from .training_free import TextState, TrainingFreeDrafter

PACES = ("expected", "fixed")

Source = TrainableDrafter | TrainingFreeDrafter


@options(kw_only=True, config=OPTIONS)
class MergedConfig:
    """Options of merged trees."""

    tree_nodes: PositiveInt = 40
    """Most nodes of the merged tree, of all sources together."""
    pace: Annotated[str, one_of(*PACES)] = "expected"
    """`expected`: each step decides which sources draft and how many nodes are verified, by the
    expected gain in time. `fixed`: every source drafts at each step, and the `tree_nodes` likeliest
    nodes are verified, so tokens per step can be reproduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedState:
    """The states of the sources, and the calibration of each row."""

    sources: tuple[Any, ...]
    counts: tuple[Counts, ...]
    open_children: tuple[Sequence[Child], ...]
    """What was proposed after each row's last accepted token. The next token is the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedDraft:
    """What `advance` needs of a proposal."""

    drafted: tuple[Any, ...]
    counts: tuple[Counts, ...]
    rows: tuple[MergedRow, ...]


class MergedDrafter(Drafter[MergedState, MergedDraft]):
    """Drafter that merges the candidates of several sources into one tree.

    `prior` is the calibration that each text starts from. Costs in seconds are measured as decoding
    goes on and kept in the drafter, never in a state.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        config: MergedConfig,
        prior: Prior | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises ValueError for sources that can't be merged."""
        require_mergeable(sources)
        self.sources, self.config, self.clock = dict(sources), config, clock
        self.prior = prior
        self._sources = tuple(sources.values())
        self._prior_counts = {} if prior is None else prior.counts(list(sources))
        self._layers = tuple(source.feature_layers for source in self._sources)

    @property
    def max_nodes(self) -> int:
        return self.config.tree_nodes

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for layers in self._layers for layer in layers}))

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and answer together; None if the target's limit suffices."""
        lengths = [source.context_length for source in self._sources if source.context_length is not None]
        return min(lengths, default=None)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the trained weights of all sources."""
        for source in self._sources:
            yield from source.parameters()

    # --- decoding: see `Drafter`

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> MergedState:
        batch = len(prompts.lengths)
        return MergedState(
            sources=tuple(
                source.init_state(prompts, self._output_for(index, prefill), max_new_tokens=max_new_tokens)
                for index, source in enumerate(self._sources)
            ),
            counts=(self._prior_counts,) * batch,
            open_children=((),) * batch,
        )

    def propose(
        self, state: MergedState, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, MergedDraft]:
        # 1. Learn from the tokens that the target chose after the last trees.
        last_tokens: list[int] = last_token.tolist()
        counts = tuple(map(_taught, state.counts, state.open_children, last_tokens))
        # 2. Ask the sources, and merge their candidates.
        drafted, candidates = zip(
            *(self._ask(index, state.sources[index], last_token, last_tokens) for index in range(len(self._sources))),
            strict=True,
        )
        rows = tuple(
            grow([Proposals(index, row) for index, row in enumerate(by_source) if row.tokens], row_counts, self.max_nodes)
            for by_source, row_counts in zip(zip(*candidates, strict=True), counts, strict=True)
        )
        tree = tree_of_rows(rows, self.max_nodes, last_token.device)
        return tree, MergedDraft(drafted=drafted, counts=counts, rows=rows)

    def advance(self, drafted: MergedDraft, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> MergedState:
        states = tuple(
            source.advance(drafted.drafted[index], tree, accepted, self._output_for(index, output))
            for index, source in enumerate(self._sources)
        )
        counts, open_children = [], []
        for row, row_counts, path, tokens in zip(
            drafted.rows, drafted.counts, accepted.host_nodes, accepted.tokens, strict=True
        ):
            row_counts = dict(row_counts) if path else row_counts
            entries = [NO_NODE, *path]
            for entry, token in zip(entries, tokens, strict=False):
                teach_children(row_counts, row.children[entry], token)
            counts.append(row_counts)
            open_children.append(row.children.get(entries[-1], ()))
        return MergedState(sources=states, counts=tuple(counts), open_children=tuple(open_children))

    def select(self, state: MergedState, rows: Sequence[int]) -> MergedState:
        return MergedState(
            sources=tuple(source.select(part, rows) for source, part in zip(self._sources, state.sources, strict=True)),
            counts=tuple(state.counts[row] for row in rows),
            open_children=tuple(state.open_children[row] for row in rows),
        )

    def _ask(
        self, index: int, state: Any, last_token: Int[torch.Tensor, " batch"], last_tokens: Sequence[int]
    ) -> tuple[Any, Sequence[Candidates]]:
        """Return what a source needs to advance, and its candidates for each row."""
        source = self._sources[index]
        if isinstance(source, TrainableDrafter):
            search, drafted = source.search(state, last_token)
            return drafted, rows_of_search(search, self.max_nodes)
        return TextState(state, last_tokens), source.candidates(state, last_tokens)

    def _skip(
        self, index: int, state: Any, last_token: Int[torch.Tensor, " batch"], last_tokens: Sequence[int]
    ) -> tuple[Any, Sequence[Candidates]]:
        """Return what a source needs to advance without drafts."""
        source = self._sources[index]
        nothing = [NO_CANDIDATES] * len(last_tokens)
        if isinstance(source, TrainableDrafter):
            return source.skip(state, last_token), nothing
        return TextState(state, last_tokens), nothing

    def _output_for(self, index: int, output: TargetOutput) -> TargetOutput:
        """Return the target's output with the features that this source reads."""
        layers, all_layers = self._layers[index], self.feature_layers
        if output.features is None or layers in ((), all_layers):
            return output
        parts = output.features.chunk(len(all_layers), dim=-1)
        return replace(output, features=torch.cat([parts[all_layers.index(layer)] for layer in layers], dim=-1))


def require_mergeable(sources: Mapping[str, Source]) -> None:
    """Raise ValueError for sources whose candidates can't form one tree."""
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise ValueError(f"a merged tree of {len(sources)} drafters; name between 1 and {MAX_SOURCES}")
    for name, source in sources.items():
        if temperature := getattr(source.config, "temperature", 0.0):
            raise ValueError(
                f"the drafter {name} draws its tokens at temperature {temperature}, and exact acceptance of drawn tokens needs "
                "a tree of theirs alone; set its temperature to 0 to merge it"
            )
    sizes = {name: source.vocab_size for name, source in sources.items() if isinstance(source, TrainableDrafter)}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"merged drafters need one vocabulary, and these have different sizes ({listed}); drop one")


def tree_of_rows(rows: Sequence[MergedRow], num_nodes: int, device: torch.device) -> DraftTree:
    """Return the tree of the likeliest nodes of each row, with their sources."""
    origins = tuple(tuple(row.origins[:num_nodes]) for row in rows)
    return tree_of([row.first(num_nodes) for row in rows], device, origins=origins)


def _taught(counts: Counts, learned: Sequence[Child], token: int) -> Counts:
    """Return the counts after the target has chosen this token among an entry's children."""
    if not learned:
        return counts
    counts = dict(counts)
    teach_children(counts, learned, token)
    return counts
