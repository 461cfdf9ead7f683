"""Labels that another drafter misses, for `train.label_weights=missed_by:DRAFTER`.

At each position to train, the other drafter proposes a tree as in decoding: it reads the text up to
there, and then the token that the target has chosen. `num_covered` is the number of draft tokens of
the continuation in this tree. It decides the weights of the labels: see `label_weights.missed_share`.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Int
from torch.nn.functional import pad

from ..data.paths import folders_of
from ..data.types import UNKNOWN, DrafterBatch, TargetReads
from ..models.decoding import DraftTree, Prompts
from ..models.decoding.acceptance import follow
from ..models.decoding.types import NO_NODE, TargetOutput
from ..models.drafters.base import LastStateDrafter, TrainableDrafter
from ..models.drafters.candidates import Candidates
from ..models.drafters.draft_model import DraftModel
from ..models.drafters.losses import MISSED_BY
from ..models.drafters.registry import TRAINING_FREE, make_training_free
from ..models.drafters.saved.loading import load_part
from ..models.drafters.saved.parts import DrafterPart, parse_drafter_name
from ..models.drafters.training_free import TrainingFreeDrafter
from ..models.llm.hf_target import HFTarget

PREFIX_TOKENS = 2**14
"""Tokens that a drafter with a KV cache reads at a time: each position needs its text anew."""


class OtherDrafter:
    """Another drafter, frozen, which shows the labels that it proposes.

    It may have several parts: then a label counts as proposed if one of them proposes it, with all
    labels before it. `seconds` is the time that they have taken.
    """

    def __init__(self, parts: Sequence[TrainableDrafter | TrainingFreeDrafter], target: HFTarget) -> None:
        self.parts = parts
        self.seconds = 0.0
        self._counters: list[Counter] = [
            TrainedCounter(part, target) if isinstance(part, TrainableDrafter) else TextCounter(part) for part in parts
        ]

    def reads(self, reads: TargetReads) -> TargetReads:
        """Return what the batches need of the target for all drafters.

        Raises ValueError if two of them read layers of the target, and different ones.
        """
        for part in self.parts:
            if not isinstance(part, TrainableDrafter):
                continue
            if reads.layers and part.feature_layers and reads.layers != part.feature_layers:
                raise ValueError(
                    f"train.label_weights names a drafter that reads the target's layers {list(part.feature_layers)}, and "
                    f"another one reads {list(reads.layers)}; a batch has the layers of one: name another drafter"
                )
            hidden_states = reads.hidden_states or part.reads_hidden_states
            reads = replace(reads, hidden_states=hidden_states, layers=reads.layers or part.feature_layers)
        return reads

    @torch.no_grad()
    def mark(self, batch: DrafterBatch) -> DrafterBatch:
        """Return the batch with `num_covered` at the positions to train."""
        started = time.perf_counter()
        num_covered = torch.zeros_like(batch.input_ids)
        num_covered[batch.positions] = torch.stack([counter.count(batch) for counter in self._counters]).amax(0)
        self.seconds += time.perf_counter() - started
        return replace(batch, num_covered=num_covered)


class Counter(Protocol):
    """Counts the draft tokens that a drafter has right."""

    def count(self, batch: DrafterBatch) -> Int[torch.Tensor, " position"]:
        """Return the number of each position to train."""


class TrainedCounter:
    """Lets a trained drafter propose at all positions, many at a time."""

    def __init__(self, drafter: TrainableDrafter, target: HFTarget) -> None:
        self.drafter = drafter
        self._dtype = target.dtype
        self._context_length = min(target.context_length, drafter.context_length or target.context_length)

    def count(self, batch: DrafterBatch) -> Int[torch.Tensor, " position"]:
        rows, columns = batch.positions.nonzero(as_tuple=True)
        # 1. The number of tokens that the drafter reads for each position.
        lengths = columns + 1 if batch.starts is None else columns + 1 - batch.starts[rows, columns]
        if isinstance(self.drafter, LastStateDrafter):
            lengths = torch.ones_like(columns)  # its state is that of the last token
        # 2. Proposals for texts of about equal lengths. No drafter proposes past its context window.
        counts = torch.zeros_like(columns)
        order = lengths.argsort(stable=True)
        order = order[lengths[order] < self._context_length]
        while len(order):
            size = max(1, int((lengths[order].cumsum(0) <= PREFIX_TOKENS).sum()))
            chunk, order = order[:size], order[size:]
            counts[chunk] = self._count(batch, rows[chunk], columns[chunk], lengths[chunk])
        return counts

    def _count(
        self,
        batch: DrafterBatch,
        rows: Int[torch.Tensor, " chunk"],
        columns: Int[torch.Tensor, " chunk"],
        lengths: Int[torch.Tensor, " chunk"],
    ) -> Int[torch.Tensor, " chunk"]:
        # 1. The texts up to the positions, and the target's states there; padding repeats the last token.
        ahead = torch.arange(int(lengths.max()), device=columns.device)
        index = ((columns - lengths + 1)[:, None] + ahead).minimum(columns[:, None])
        prompts = Prompts(input_ids=batch.input_ids[rows[:, None], index], lengths=tuple(lengths.tolist()))
        states, features = (
            None if values is None else values[rows[:, None], index].to(self._dtype)
            for values in (batch.hidden_states, batch.features)
        )
        if states is None:  # a drafter that is a language model reads none
            states = torch.empty(*index.shape, 0, device=index.device)
        prefill = TargetOutput(logits=states[:, :1, :0], hidden_states=states, features=features)
        # 2. The drafter's proposal after the target's own token.
        continuations = batch.continuations[rows, columns]
        state = self.drafter.init_state(prompts, prefill, max_new_tokens=continuations.shape[1])
        tree, _ = self.drafter.propose(state, continuations[:, 0])
        return count_covered(tree, continuations[:, 1:])


class TextCounter:
    """Lets a training-free drafter propose at all positions, text by text on the host."""

    def __init__(self, drafter: TrainingFreeDrafter) -> None:
        self.drafter = drafter

    def count(self, batch: DrafterBatch) -> Int[torch.Tensor, " position"]:
        rows, columns = batch.positions.nonzero(as_tuple=True)
        starts = torch.zeros_like(rows) if batch.starts is None else batch.starts[rows, columns]
        continuations = batch.continuations[rows, columns].tolist()
        input_ids = batch.input_ids.cpu()
        counts, text = [], None
        for row, start, column, (chosen, *labels) in zip(
            rows.tolist(), starts.tolist(), columns.tolist(), continuations, strict=True
        ):
            if (row, start) != text:
                text, store, read = (row, start), self.drafter.store_factory()(), start
            store.add(input_ids[row, read : column + 1].tolist())
            read = column + 1
            counts.append(longest_path(self.drafter.candidates_of(store, [chosen]), labels))
        return torch.tensor(counts, device=rows.device)


def longest_path(candidates: Candidates, labels: Sequence[int]) -> int:
    """Count the labels from the first one on that are a path of the candidates."""
    nodes = {link: node for node, link in enumerate(zip(candidates.parents, candidates.tokens, strict=True))}
    node = NO_NODE
    for depth, label in enumerate(labels):
        if (node, label) not in nodes:
            return depth
        node = nodes[node, label]
    return len(labels)


def count_covered(tree: DraftTree, labels: Int[torch.Tensor, "position depth"]) -> Int[torch.Tensor, " position"]:
    """Count the labels from the first one on that are a path of the tree."""
    # The dummy column is the label of nodes that are deeper than the labels.
    labels = pad(labels, (0, 1), value=UNKNOWN)
    depth = (tree.depths - 1).clamp(min=0, max=labels.shape[1] - 1)
    label = labels.gather(1, depth)
    return follow(tree, (tree.tokens == label) & (label != UNKNOWN)).num_accepted


def require_other(name: str, drafter_dir: Path) -> None:
    """Raise ValueError if `train.label_weights` names the drafter that is to be trained."""
    if drafter_dir.resolve() in [Path(folder).resolve() for folder in folders_of(name)]:
        raise ValueError(
            f"train.label_weights is {MISSED_BY}{name}, and {drafter_dir} is the drafter to be trained: name another drafter, "
            "or train into another output_dir"
        )


def open_other(name: str, target: HFTarget) -> OtherDrafter:
    """Load the drafter that `train.label_weights` names.

    Raises ValueError if there is none, if it doesn't fit the target, if its drafts are drawn at
    random, and if it reads what training doesn't have.
    """
    with naming_option(name):
        drafters = [_open_part(part, target) for part in parse_drafter_name(name).parts]
    return OtherDrafter(drafters, target)


def _open_part(part: DrafterPart, target: HFTarget) -> TrainableDrafter | TrainingFreeDrafter:
    if part.folder is None:
        if TRAINING_FREE[part.name].entries is not TrainingFreeDrafter.entries:
            raise ValueError(
                f"{part.name} drafts from the target's logits of earlier steps, and training has none; name a drafter that "
                "reads the text alone (suffix, prompt_lookup), or a trained one"
            )
        return make_training_free(part.name, {}, target)
    drafter = load_part(part, target, {})
    if isinstance(drafter, DraftModel) and drafter.config.temperature:
        raise ValueError(
            f"that draft model draws its tokens at random (temperature {drafter.config.temperature}), so its misses are left "
            "to chance; name a drafter with temperature 0"
        )
    return drafter


def describe_other(name: str) -> dict[str, Any]:
    """Return what decides the proposals of the drafter that `train.label_weights` names."""
    with naming_option(name):
        parts = parse_drafter_name(name)
        return {
            "parts": {part.name: asdict(part.config({})) for part in parts.parts},
            **({"weights_sha256": parts.weights} if parts.weights else {}),
        }


@contextmanager
def naming_option(name: str) -> Iterator[None]:
    """Begin the messages of errors with the option."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"train.label_weights is {MISSED_BY}{name}: {error}") from error
