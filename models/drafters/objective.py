"""The training objective of all drafters: the losses of labels, and counts of right drafts.

Losses are computed in chunks of labels and recomputed for the gradient, so memory doesn't grow with
labels x vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ...data.types import DrafterBatch
from .labels import Labels, dpace_weights
from .loss_parts import TINY, Column, LossParts, Part, Teacher, TextTokens, TopTeacher, chunks
from .losses import LossKind
from .vocabulary import DraftVocabulary

LOSS_DECAY = 0.8
"""Factor of the loss from each depth to the next (Medusa, section 2.2.1; EAGLE-3, section 3.2)."""
HIT_RANKS = 10
"""Training reports how often the label is among the 1..HIT_RANKS most probable tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Sums and counts by depth, never means: divide once, after adding batches and processes.

    `depth` counts draft tokens from 0. `hits[d, k]` counts positions whose label is among the k + 1
    most probable tokens at depth d. `joint_hits[d]` counts positions whose labels at depths 0..d
    are all the most probable token; a chain would have accepted them. `sums` cover the trained
    depths, which are the first ones and may be fewer; their mean is over the labels of those depths
    only.
    """

    sums: Float[torch.Tensor, " trained_depth"]
    counts: Int[torch.Tensor, " depth"]
    hits: Int[torch.Tensor, "depth rank"]
    joint_hits: Int[torch.Tensor, " depth"]

    def decayed(self, objective: "Objective") -> "Loss":
        """Multiply the sum of depth d by LOSS_DECAY to the power of d, unless weights of labels stand for it."""
        if objective.weights == "dpace":
            return self
        return replace(self, sums=self.sums * LOSS_DECAY ** torch.arange(len(self.sums), device=self.sums.device))


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What training minimises, the same for every kind of drafter.

    p is known where a continuation follows the text, since the target has read that. Elsewhere p is
    taken as one-hot at the label. If labels are samples from p, then the one-hot distributions are p on average, so
    cross-entropy and `kl` have the same gradient on average as with p itself.
    """

    loss: LossKind = LossKind.cross_entropy
    weights: str = "uniform"
    """`uniform`, or `dpace`, which weights labels by `dpace_weights`, in place of a drafter's own
    factors of depths."""
    head: nn.Linear | None = None
    """The target's head, frozen: it maps hidden states to p. With `full`, all losses except
    cross-entropy need it."""
    teacher: str = "full"
    """`full`: p of all tokens. `top_k`: p of the top-k tokens in the batch, and of "any other" as
    one more outcome. q is merged in the same way. Merging outcomes makes no divergence larger and
    no overlap smaller. So training minimises a bound of the loss, which is exact if k is the whole
    vocabulary. Nothing constrains how q divides the remaining probability."""


def score(
    predict: Callable[..., Float[torch.Tensor, "label output"]],
    inputs: tuple[Column, ...],
    labels: Labels,
    batch: DrafterBatch,
    objective: Objective,
    *,
    vocabulary: DraftVocabulary,
    trained_depths: int | None = None,
) -> Loss:
    """Compute the loss of a drafter from `inputs`, one row per known label, by position.

    `predict` computes the logits of such rows. Arrays among them stay on the host. A label outside a
    reduced vocabulary counts as a miss. It adds nothing to the sums if the label is the teacher: in the cross-entropy, and in
    every loss off the text. Depths from `trained_depths` on have no sums, only counts and hits.
    """
    # 1. Divide the labels, so only those with a teacher cost its computation. The parts don't depend
    # on the labels: every process runs the same modules, and every parameter has a gradient.
    known, num_depths = labels.known, labels.known.shape[1]
    teacher = make_teacher(batch, objective, vocabulary)
    parts = LossParts.of(labels, None if teacher is None else teacher.knows, trained_depths)
    rows = LabelRows(*vocabulary.outputs(labels.take(labels.tokens)), None, inputs)
    # 2. Evaluate each part.
    losses = [per_label_loss(partial(against_label, predict), rows.take(parts.alone), vocabulary.num_outputs)]
    if teacher is not None and parts.taught is not None:
        evaluate = partial(against_teacher, predict, teacher, objective.loss)
        losses.append(per_label_loss(evaluate, rows.take(parts.taught), teacher.num_columns))
    if parts.untrained is not None:
        losses.append(per_label_loss(partial(rank_only, predict), rows.take(parts.untrained), vocabulary.num_outputs))
    # 3. Restore the order of the labels, and sum the losses by depth.
    loss = parts.in_order([loss_of(values, objective.loss) for values in losses])
    ranks = labels.spread(parts.in_order([values.rank for values in losses]), HIT_RANKS)
    if objective.weights == "dpace":
        log_prob = parts.in_order([values.log_prob for values in losses])
        loss = loss * labels.take(dpace_weights(labels.spread(log_prob.to(loss.dtype), 0), known))
    sums = torch.zeros(num_depths, device=loss.device, dtype=loss.dtype)
    return Loss(
        sums=sums.index_add(0, labels.known_labels.depth, loss)[:trained_depths],
        counts=known.sum(0),
        hits=(ranks[:, :, None] <= torch.arange(HIT_RANKS, device=known.device)).sum(0),
        joint_hits=(ranks == 0).cumprod(1).sum(0),
    )


class LabelRows(NamedTuple):
    """Labels, and the inputs of each label's loss. All fields have one row per label."""

    output: Int[torch.Tensor, " label"]
    """Index of the label among the drafter's outputs; arbitrary if it isn't among them."""
    inside: Bool[torch.Tensor, " label"]
    """Whether the drafter's vocabulary has the label."""
    text: TextTokens | None
    """Tokens of the text, for labels with a teacher."""
    inputs: tuple[Column, ...]
    """Arguments of `predict`, one row per label."""

    def take(self, part: Part) -> "LabelRows":
        """Return the rows of a part, in its order."""
        if part.index is None:
            return self
        inputs = tuple(part.of(column) for column in self.inputs)
        return LabelRows(self.output[part.index], self.inside[part.index], part.text, inputs)

    def split(self, size: int) -> "list[LabelRows]":
        """Return chunks of `size` rows."""
        outputs, insides = self.output.split(size), self.inside.split(size)
        texts = [None] * len(outputs) if self.text is None else self.text.split(size)
        inputs = zip(*(chunks(column, size) for column in self.inputs), strict=True)
        return [LabelRows(*rows) for rows in zip(outputs, insides, texts, inputs, strict=True)]


class LabelLoss(NamedTuple):
    """Parts of each label's loss, for `loss_of`, and the label's rank."""

    cross_entropy: Float[torch.Tensor, " label"]
    """-log q(label). It and the next two are arbitrary where the loss doesn't read them."""
    kl: Float[torch.Tensor, " label"]
    """KL from the teacher; the cross-entropy if the label is the teacher."""
    overlap: Float[torch.Tensor, " label"]
    """sum min(p, q)"""
    rank: Int[torch.Tensor, " label"]
    """Number of outputs more probable than the label; HIT_RANKS for a label outside the
    vocabulary."""
    log_prob: Float[torch.Tensor, " label"]
    """log q(label), without a gradient; minus infinity for a label outside the vocabulary, 0 for
    one that isn't trained on."""


def loss_of(values: LabelLoss, kind: LossKind) -> Float[torch.Tensor, " label"]:
    """Return the loss of each label: see `LossKind`."""
    if kind is not LossKind.kl_acceptance:
        simple: torch.Tensor = getattr(values, kind.value)
        return simple
    share = values.overlap.detach()
    return share * -values.overlap.clamp(min=TINY).log() + (1 - share) * values.kl


def against_label(predict: Callable[..., torch.Tensor], rows: LabelRows) -> LabelLoss:
    """Compare the drafter with the label, as if p were one-hot."""
    logits, rank = logits_and_rank(predict, rows)
    entropy = F.cross_entropy(logits, rows.output, reduction="none") * rows.inside
    # The overlap is q(label), or 1 if the label is outside, so such a label adds nothing to any
    # loss.
    return LabelLoss(entropy, entropy, entropy.neg().exp(), rank, log_prob_of(entropy.detach().neg(), rows))


def against_teacher(
    predict: Callable[..., torch.Tensor], teacher: Teacher | TopTeacher, loss: LossKind, rows: LabelRows
) -> LabelLoss:
    """Compare the drafter with the target's distribution; compute the fields that the loss reads.

    Divergences use p restricted to a reduced vocabulary and normalised.
    """
    logits, rank = logits_and_rank(predict, rows)
    log_probs = logits.log_softmax(1)
    assert rows.text is not None, "these labels have a teacher"
    p, log_q = teacher.outcomes(rows.text, log_probs)
    inside_p = p / p.sum(1, keepdim=True).clamp(min=TINY) if teacher.reduced else p
    # Each field costs one or two more tensors of all logits, and memory for their gradient.
    label_log_prob = log_probs.detach().gather(1, rows.output[:, None])[:, 0]
    kl = F.kl_div(log_q, inside_p, reduction="none").sum(1)
    is_read = loss is LossKind.kl_acceptance
    overlap = torch.minimum(p, log_q.exp()).sum(1) if is_read else torch.zeros_like(label_log_prob)
    entropy = -label_log_prob * rows.inside
    return LabelLoss(entropy, kl, overlap, rank, log_prob_of(label_log_prob.detach(), rows))


def log_prob_of(values: Float[torch.Tensor, " label"], rows: LabelRows) -> Float[torch.Tensor, " label"]:
    """Return the labels' log-probabilities, given those of the labels in the vocabulary."""
    return values.where(rows.inside, -torch.inf)


@torch.no_grad()
def rank_only(predict: Callable[..., torch.Tensor], rows: LabelRows) -> LabelLoss:
    """Compute only the rank, for a label that isn't trained on."""
    _, rank = logits_and_rank(predict, rows)
    zeros = torch.zeros_like(rank, dtype=torch.float)
    # An overlap of 1 is no loss.
    return LabelLoss(zeros, zeros, torch.ones_like(zeros), rank, zeros)


def logits_and_rank(
    predict: Callable[..., torch.Tensor], rows: LabelRows
) -> tuple[Float[torch.Tensor, "label output"], Int[torch.Tensor, " label"]]:
    """Return the drafter's logits in float32, and the ranks of the labels."""
    logits = predict(*rows.inputs)
    values, output = logits.detach(), rows.output[:, None]
    label = values.gather(1, output)
    rank = (values > label).sum(1, dtype=torch.int32)  # the default, int64, takes twice as long
    # In 16 bits many logits are equal. The arg-max takes the first of equal ones, so count those
    # before.
    if values.dtype != torch.float32:
        first = torch.arange(values.shape[1], device=values.device) < output
        rank += ((values == label) & first).sum(1, dtype=torch.int32)
    return logits.float(), torch.where(rows.inside, rank, HIT_RANKS)


def per_label_loss(evaluate: Callable[[LabelRows], LabelLoss], rows: LabelRows, num_columns: int) -> LabelLoss:
    """Evaluate the rows in chunks, and return the losses.

    `num_columns` is the width of the widest tensor that `evaluate` computes. Several chunks keep
    only the result: the backward pass recomputes the rest.
    """
    size = max(1, max_chunk(rows.output.device) // num_columns)
    if len(rows.output) <= size:
        return evaluate(rows)
    evaluate = SharedCasts().shared(evaluate)
    losses = [checkpoint(evaluate, chunk, use_reentrant=False) for chunk in rows.split(size)]
    return LabelLoss(*(torch.cat(column) for column in zip(*losses, strict=True)))


def make_teacher(batch: DrafterBatch, objective: Objective, vocabulary: DraftVocabulary) -> Teacher | TopTeacher | None:
    """Build the teacher of the objective, or None if the loss needs none.

    Raises ValueError for missing inputs.
    """
    if not objective.loss.needs_teacher:
        return None
    if objective.teacher == "top_k":
        return TopTeacher.of(batch, vocabulary)
    if objective.head is None or batch.hidden_states is None:
        raise ValueError(f"the loss {objective.loss} needs the target's head and hidden states; give both, or cross_entropy")
    return Teacher(states=batch.hidden_states.flatten(0, 1), head=objective.head, vocabulary=vocabulary)


# --- chunks: how large they are, and weights that they share under autocast


MAX_CHUNK = 2**26
"""Logits held at a time: 256 MiB in float32, and a few times that while their loss is computed.

A smaller chunk costs time: for every chunk, a trained head's whole gradient is added up once more
(benchmarks/loss_memory.json)."""
CHUNK_SHARE = 80
"""On CUDA, logits in float32 may take a part of so much of the card's memory: 1 GiB of 80."""
FLOAT_BYTES = 4


def max_chunk(device: torch.device) -> int:
    """Return the number of logits that a loss holds at a time on `device`.

    It depends on the card's memory, not on the free part, so that a run repeats its rounding.
    """
    if device.type != "cuda":
        return MAX_CHUNK
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(MAX_CHUNK, memory // (CHUNK_SHARE * FLOAT_BYTES))


class SharedCasts(TorchFunctionMode):
    """Casts each weight of a linear layer once for autocast, inside calls of `shared`.

    Autocast keeps its casts until its block ends. A chunk that is recomputed in the backward pass
    enters autocast anew, so each chunk would cast a trained head once more. The values and the
    gradients are the same as autocast's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._casts: dict[torch.Tensor, torch.Tensor] = {}

    def shared(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with shared casts."""

        def call(*args: Any) -> Any:
            with self:
                return function(*args)

        return call

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and len(args) > 1:
            args = (args[0], self._cast(args[1]), *args[2:])
        return function(*args, **(kwargs or {}))

    def _cast(self, weight: torch.Tensor) -> torch.Tensor:
        device = weight.device.type
        trained = weight.is_leaf and weight.requires_grad and weight.dtype == torch.float32
        if not (trained and torch.is_autocast_enabled(device)):
            return weight
        if weight not in self._casts:
            self._casts[weight] = weight.to(torch.get_autocast_dtype(device))
        return self._casts[weight]
