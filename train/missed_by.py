"""Labels that another drafter misses, for `train.label_weights=missed_by:DRAFTER`.

At each position to train, the other drafter proposes a tree as in decoding: it reads the text up to
there, and then the token that the target has chosen. `num_covered` is the number of draft tokens of
the continuation in this tree. It decides the weights of the labels: see `objective.missed_share`.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch.nn.functional import pad

from ..data.files import sha256_file
from ..data.types import UNKNOWN, DrafterBatch, TargetReads
from ..models.decoding import DraftTree, Prompts
from ..models.decoding.acceptance import follow
from ..models.decoding.types import TargetOutput
from ..models.drafters import load_drafter
from ..models.drafters.base import TrainableDrafter
from ..models.drafters.draft_model import DraftModel
from ..models.drafters.last_state import LastStateDrafter
from ..models.drafters.losses import MISSED_BY
from ..models.drafters.saved.download import resolve_drafter
from ..models.drafters.saved.folder import WEIGHTS_FILE, read_drafter_config
from ..models.target.hf_target import HFTarget

PREFIX_TOKENS = 2**14
"""Tokens that a drafter with a KV cache reads at a time: each position needs its text anew."""


class OtherDrafter:
    """A frozen drafter that shows which labels it proposes.

    `seconds` is the time that it has taken.
    """

    def __init__(self, drafter: TrainableDrafter, target: HFTarget) -> None:
        self.drafter = drafter
        self.seconds = 0.0
        self._dtype = target.dtype
        self._context_length = min(target.context_length, drafter.context_length or target.context_length)

    def reads(self, reads: TargetReads) -> TargetReads:
        """Return what the batches need of the target for both drafters.

        Raises ValueError if both read layers of the target, and different ones.
        """
        layers = self.drafter.feature_layers
        if reads.layers and layers and reads.layers != layers:
            raise ValueError(
                f"train.label_weights names a drafter that reads the target's layers {list(layers)}, and the trained drafter "
                f"reads {list(reads.layers)}; a batch has the layers of one: name another drafter"
            )
        hidden_states = reads.hidden_states or self.drafter.reads_hidden_states
        return replace(reads, hidden_states=hidden_states, layers=reads.layers or layers)

    @torch.no_grad()
    def mark(self, batch: DrafterBatch) -> DrafterBatch:
        """Return the batch with `num_covered` at the positions to train."""
        started = time.perf_counter()
        rows, columns = batch.positions.nonzero(as_tuple=True)
        num_covered = torch.zeros_like(batch.input_ids)
        for chunk in self._chunks(batch, rows, columns):
            num_covered[rows[chunk], columns[chunk]] = self._count(batch, rows[chunk], columns[chunk])
        self.seconds += time.perf_counter() - started
        return replace(batch, num_covered=num_covered)

    def _chunks(
        self, batch: DrafterBatch, rows: Int[torch.Tensor, " position"], columns: Int[torch.Tensor, " position"]
    ) -> Iterator[Int[torch.Tensor, " chunk"]]:
        """Yield positions of about equally long texts, at most PREFIX_TOKENS tokens at a time."""
        lengths = self._lengths(batch, rows, columns)
        order = lengths.argsort(stable=True)
        order = order[lengths[order] < self._context_length]  # no drafter proposes past its context window
        while len(order):
            longest = lengths[order].cumsum(0)
            size = max(1, int((longest <= PREFIX_TOKENS).sum()))
            yield order[:size]
            order = order[size:]

    def _lengths(
        self, batch: DrafterBatch, rows: Int[torch.Tensor, " position"], columns: Int[torch.Tensor, " position"]
    ) -> Int[torch.Tensor, " position"]:
        """Return the number of tokens that the drafter reads for each position."""
        if isinstance(self.drafter, LastStateDrafter):
            return torch.ones_like(columns)  # its state is that of the last token
        return columns + 1 if batch.starts is None else columns + 1 - batch.starts[rows, columns]

    def _count(
        self, batch: DrafterBatch, rows: Int[torch.Tensor, " chunk"], columns: Int[torch.Tensor, " chunk"]
    ) -> Int[torch.Tensor, " chunk"]:
        """Let the drafter propose at these positions, and count the tokens that it has right."""
        # 1. The texts up to the positions, and the target's states there, padded on the right.
        lengths = self._lengths(batch, rows, columns)
        ahead = torch.arange(int(lengths.max()), device=columns.device)
        index = (columns - lengths + 1)[:, None] + ahead
        index = index.minimum(columns[:, None])  # padding repeats the last token
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


def count_covered(tree: DraftTree, labels: Int[torch.Tensor, "position depth"]) -> Int[torch.Tensor, " position"]:
    """Count the labels from the first one on that are a path of the tree."""
    # The dummy column is the label of nodes that are deeper than the labels.
    labels = pad(labels, (0, 1), value=UNKNOWN)
    depth = (tree.depths - 1).clamp(min=0, max=labels.shape[1] - 1)
    label = labels.gather(1, depth)
    return follow(tree, (tree.tokens == label) & (label != UNKNOWN)).num_accepted


def require_other(name: str, drafter_dir: Path) -> None:
    """Raise ValueError if `train.label_weights` names the drafter that is to be trained."""
    if resolve_drafter(name).resolve() == drafter_dir.resolve():
        raise ValueError(
            f"train.label_weights is {MISSED_BY}{name}, and that is the drafter to be trained: name another drafter, or train "
            "into another output_dir"
        )


def open_other(name: str, target: HFTarget) -> OtherDrafter:
    """Load the drafter that `train.label_weights` names.

    Raises ValueError if there is none, if it doesn't fit the target, and if its drafts are drawn at
    random.
    """
    try:
        drafter = load_drafter(name, target)
    except ValueError as error:
        raise ValueError(f"train.label_weights is {MISSED_BY}{name}: {error}") from error
    if isinstance(drafter, DraftModel) and drafter.config.temperature:
        raise ValueError(
            f"train.label_weights is {MISSED_BY}{name}, a draft model that draws its tokens at random (temperature "
            f"{drafter.config.temperature}), so what it misses is left to chance; name a drafter with temperature 0"
        )
    return OtherDrafter(drafter, target)


def describe_other(name: str) -> dict[str, Any]:
    """Return what decides the proposals of the drafter that `train.label_weights` names."""
    folder = resolve_drafter(name)
    try:
        saved = read_drafter_config(folder)
    except ValueError as error:
        raise ValueError(f"train.label_weights is {MISSED_BY}{name}: {error}") from error
    return {"kind": saved.kind, **saved.drafter, "weights_sha256": sha256_file(folder / WEIGHTS_FILE)}
