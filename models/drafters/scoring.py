"""The losses of labels, and counts of right drafts: see `objective`.

Losses are computed in chunks of labels. Several chunks are recomputed for the gradient, so memory
doesn't grow with labels x vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ...data.types import DrafterBatch
from .labels import Labels, dpace_weights
from .losses import LossKind
from .objective import HIT_RANKS, Loss, Objective
from .teachers import TINY, Teacher, TopTeacher
from .vocabulary import DraftVocabulary

MANY_OUTPUTS = 1000
"""Outputs from which on, on a CPU, a label's rank is sought among the largest logits first."""


def score(
    predict: Callable[..., Float[torch.Tensor, "label output"]],
    inputs: tuple[Shaped[torch.Tensor, "*_"], ...],
    labels: Labels,
    batch: DrafterBatch,
    objective: Objective,
    *,
    vocabulary: DraftVocabulary,
    entries: Int[torch.Tensor, "position depth"] | None = None,
) -> Loss:
    """Compute the loss of a drafter from `inputs` at every position and depth: [position, depth, *rest].

    With `entries` the inputs are by entry, [entry, *rest], and label [n, d] follows entry `entries[n, d]`. Labels that are
    the same token after the same entry are evaluated once. The entries of a text are in the order of its tokens, so a
    teacher computes each distribution once.

    `predict` computes the logits of rows of them. A label outside a reduced vocabulary counts as a
    miss. It adds nothing to the sums if the label is the teacher: in the cross-entropy, and in every
    loss off the text.

    Raises ValueError if the loss needs the target's head, its hidden states or its top-k tokens, and
    the objective or the batch has none.
    """
    known, teacher = labels.known, make_teacher(batch, objective, vocabulary)

    def losses_at(
        index: Int[torch.Tensor, " label"], evaluate: Callable[[LabelRows], LabelLoss], num_columns: int
    ) -> LabelLoss:
        # Two indexes copy only these rows. Inputs may be expanded over the depths: to flatten them
        # would copy position x depth first.
        position, depth = index // known.shape[1], index % known.shape[1]
        tokens, text = labels.tokens[position, depth], labels.text_index[position, depth]
        if entries is None:
            rows = LabelRows(*vocabulary.outputs(tokens), text, tuple(column[position, depth] for column in inputs))
            return per_label_loss(evaluate, rows, num_columns)
        # The labels that differ, and which of them each label is.
        pairs, which = (entries[position, depth] * vocabulary.size + tokens).unique(return_inverse=True)
        after, tokens = pairs // vocabulary.size, pairs % vocabulary.size
        text = torch.empty_like(pairs).index_copy(0, which, text)
        rows = LabelRows(*vocabulary.outputs(tokens), text, tuple(column[after] for column in inputs))
        return LabelLoss(*(column[which] for column in per_label_loss(evaluate, rows, num_columns)))

    # 1. The labels without a teacher, and then those with one; the teacher is computed only for the
    # second group. A group is evaluated even if it is empty: so every process runs the same modules,
    # and every parameter has a gradient.
    taught = torch.zeros_like(known) if teacher is None else known & labels.on_text & teacher.knows(labels.text_index)
    indexes = [places(known & ~taught)]
    losses = [losses_at(indexes[0], partial(against_label, predict), vocabulary.num_outputs)]
    if teacher is not None:
        index = places(taught)
        # In the order of the text, where labels after the same token are neighbours.
        indexes.append(index[labels.text_index.flatten()[index].argsort(stable=True)])
        evaluate = partial(against_teacher, predict, teacher, objective.loss)
        losses.append(losses_at(indexes[1], evaluate, teacher.num_columns))

    # 2. By position and depth, and summed by depth.
    def spread(values: Sequence[torch.Tensor], empty: int) -> Shaped[torch.Tensor, "position depth"]:
        """Return values of all labels at their places; `empty` where there is no label."""
        whole = torch.full_like(known, empty, dtype=values[0].dtype).flatten()
        return whole.index_copy(0, torch.cat(indexes), torch.cat(list(values))).view_as(known)

    by_label, log_prob, ranks = zip(*losses, strict=True)
    loss, rank = spread(by_label, 0), spread(ranks, HIT_RANKS)
    if objective.weights == "dpace":
        loss = loss * dpace_weights(spread(log_prob, 0), known)
    return Loss(
        sums=loss.sum(0),
        counts=known.sum(0),
        hits=(rank[:, :, None] <= torch.arange(HIT_RANKS, device=known.device)).sum(0),
        joint_hits=(rank == 0).cumprod(1).sum(0),
    )


def places(mask: Bool[torch.Tensor, "position depth"]) -> Int[torch.Tensor, " label"]:
    """Return the indexes of the marked labels among all position x depth. The host waits for their number."""
    return mask.flatten().nonzero().squeeze(1)


class LabelRows(NamedTuple):
    """Labels, and the inputs of each label's loss. All fields have one row per label."""

    output: Int[torch.Tensor, " label"]
    """Index of the label among the drafter's outputs; arbitrary if it isn't among them."""
    inside: Bool[torch.Tensor, " label"]
    """Whether the drafter's vocabulary has the label."""
    text: Int[torch.Tensor, " label"]
    """Index of the token of the text after which the label follows, for a teacher."""
    inputs: tuple[Shaped[torch.Tensor, "label *_"], ...]
    """Arguments of `predict`."""

    def split(self, size: int) -> "list[LabelRows]":
        """Return chunks of `size` rows."""
        columns = [column.split(size) for column in (self.output, self.inside, self.text, *self.inputs)]
        return [LabelRows(output, inside, text, tuple(rows)) for output, inside, text, *rows in zip(*columns, strict=True)]


class LabelLoss(NamedTuple):
    """The loss of each label, and how well the drafter predicts it."""

    loss: Float[torch.Tensor, " label"]
    log_prob: Float[torch.Tensor, " label"]
    """log q(label), without a gradient; minus infinity for a label outside the vocabulary."""
    rank: Int[torch.Tensor, " label"]
    """Number of outputs more probable than the label; HIT_RANKS for a label outside the
    vocabulary."""


def against_label(predict: Callable[..., torch.Tensor], rows: LabelRows) -> LabelLoss:
    """Compare the drafter with the label: p is one-hot, so every loss is -log q(label).

    The overlap is q(label), and its weights add up to 1. A label outside the vocabulary adds nothing.
    """
    logits, rank = logits_and_rank(predict, rows)
    entropy = F.cross_entropy(logits, rows.output, reduction="none")
    return LabelLoss(entropy * rows.inside, entropy.detach().neg().where(rows.inside, -torch.inf), rank)


def against_teacher(
    predict: Callable[..., torch.Tensor], teacher: Teacher | TopTeacher, kind: LossKind, rows: LabelRows
) -> LabelLoss:
    """Compare the drafter with the target's distribution: see `LossKind`.

    Divergences use p restricted to a reduced vocabulary and normalised.
    """
    logits, rank = logits_and_rank(predict, rows)
    log_probs = logits.log_softmax(1)
    p, log_q = teacher.outcomes(rows.text, log_probs)
    inside_p = p / p.sum(1, keepdim=True).clamp(min=TINY) if teacher.reduced else p
    loss = F.kl_div(log_q, inside_p, reduction="none").sum(1)
    if kind is LossKind.kl_acceptance:
        overlap = torch.minimum(p, log_q.exp()).sum(1)
        share = overlap.detach()
        loss = share * -overlap.clamp(min=TINY).log() + (1 - share) * loss
    log_prob = log_probs.detach().gather(1, rows.output[:, None])[:, 0]
    return LabelLoss(loss, log_prob.where(rows.inside, -torch.inf), rank)


def logits_and_rank(
    predict: Callable[..., torch.Tensor], rows: LabelRows
) -> tuple[Float[torch.Tensor, "label output"], Int[torch.Tensor, " label"]]:
    """Return the drafter's logits in float32, and the ranks of the labels, of which those from HIT_RANKS on are one."""
    logits = predict(*rows.inputs)
    values, output = logits.detach(), rows.output[:, None]
    label = values.gather(1, output)
    if values.device.type != "cpu" or values.shape[1] < MANY_OUTPUTS:
        rank = rank_among(values, torch.arange(values.shape[1], device=values.device), label, output)
    else:
        # To find the few largest takes a CPU a quarter of the time of comparing all. Of equal ones `topk` returns any,
        # so where the last ones equal the label, all are compared.
        top, index = values.topk(HIT_RANKS, dim=1)
        rank = rank_among(top, index, label, output)
        unsure = (top[:, -1:] == label).squeeze(1).nonzero().squeeze(1)
        rank[unsure] = rank_among(values[unsure], torch.arange(values.shape[1]), label[unsure], output[unsure])
    return logits.float(), torch.where(rows.inside, rank, HIT_RANKS)


def rank_among(
    values: Float[torch.Tensor, "label value"],
    outputs: Int[torch.Tensor, "*#label value"],
    label: Float[torch.Tensor, "label 1"],
    output: Int[torch.Tensor, "label 1"],
) -> Int[torch.Tensor, " label"]:
    """Return how many `values` come before the label's. They are the logits of `outputs`.

    In 16 bits many logits are equal. The arg-max takes the first of equal ones, so those before the label count.
    """
    rank = (values > label).sum(1, dtype=torch.int32)  # the default, int64, takes twice as long
    if values.dtype != torch.float32:
        rank += ((values == label) & (outputs < output)).sum(1, dtype=torch.int32)
    return rank


def per_label_loss(evaluate: Callable[[LabelRows], LabelLoss], rows: LabelRows, num_columns: int) -> LabelLoss:
    """Evaluate the rows in chunks, and return the losses.

    `num_columns` is the width of the widest tensor that `evaluate` computes. Several chunks keep
    only the result: the backward pass recomputes the rest.
    """
    size = max(1, max_chunk(rows.output.device) // num_columns)
    if len(rows.output) <= size:
        return evaluate(rows)
    evaluate = SharedCasts().shared(evaluate)
    # No loss draws random numbers, so their state needn't be saved for each chunk.
    recomputed = partial(checkpoint, evaluate, use_reentrant=False, preserve_rng_state=False)
    losses = [recomputed(chunk) for chunk in rows.split(size)]
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
"""Logits held at a time (on CUDA at least so many): 256 MiB in float32, and a few times that while
their loss is computed.

A smaller chunk costs time: for every chunk, a trained head's whole gradient is added up once more
(benchmarks/loss_memory.json)."""
CHUNK_SHARE = 80
"""On CUDA, a chunk's logits in float32 may take 1 / CHUNK_SHARE of the card's memory."""
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
