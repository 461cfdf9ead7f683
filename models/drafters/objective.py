"""What every drafter is trained with: its labels, the loss of each, and how often it would be accepted.

Losses are computed in chunks of labels and recomputed for the gradient, so that memory doesn't grow with labels x vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum, auto

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ...data.types import UNKNOWN, DrafterBatch

HIT_RANKS = 10
"""Training reports how often the label is among the 1..HIT_RANKS likeliest tokens."""

MAX_CHUNK = 2**26
"""Logits held at a time: 256 MiB in float32, and a few times that while their loss is computed. Less would cost time: for every
chunk a trained head's whole gradient is added up once more (scripts/bench_loss_memory.py)."""

TINY = 1e-12
"""Keeps logarithms and quotients of probabilities finite."""

LEAST_REST = 1e-6
"""Least probability of all tokens but the likeliest: as 1 less a sum in float32, a smaller one would be rounding."""

WEIGHTS = ("uniform", "reached")
TEACHERS = ("full", "top_k")


class LossKind(StrEnum):
    """A loss of one label. p is the target's distribution, q the drafter's, overlap is sum min(p, q).

    The overlap is the probability that speculative sampling accepts the draft token (arXiv 2211.17192,
    section 3.3). `reverse_kl` would rather miss some of p than offer what p lacks (arXiv 2306.08543,
    section 2). The two blends weight their parts by the label's current overlap, as a constant: KL
    leads where the drafter is weak. No weight is a mean over a batch, so a loss doesn't depend on how
    a step is divided.
    """

    cross_entropy = auto()
    """-log q(label)"""
    kl = auto()
    """KL(p || q)"""
    reverse_kl = auto()
    """KL(q || p)"""
    tv = auto()
    """1 - overlap: the total variation distance of p and q"""
    acceptance = auto()
    """-log overlap"""
    kl_tv = auto()
    """overlap x tv + (1 - overlap) x kl"""
    kl_acceptance = auto()
    """overlap x acceptance + (1 - overlap) x kl"""

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss reads p, not just the label."""
        return self is not LossKind.cross_entropy

    @property
    def reads_overlap(self) -> bool:
        """Whether the overlap is a part of the loss."""
        return self.is_total_variation or self in (LossKind.acceptance, LossKind.kl_acceptance)

    @property
    def is_total_variation(self) -> bool:
        """Whether the part made of the overlap is 1 - overlap; it is -log overlap otherwise."""
        return self in (LossKind.tv, LossKind.kl_tv)

    @property
    def is_blend(self) -> bool:
        """Whether the loss blends KL with a part made of the overlap."""
        return self in (LossKind.kl_tv, LossKind.kl_acceptance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Sums and counts by depth, never a mean: whoever adds batches or processes together divides once, at the end.

    `depth` counts draft tokens from 0. `hits[d, k]` counts positions whose label is among the k + 1 likeliest tokens at depth
    d; `joint_hits[d]` those whose labels at depths 0..d are all the likeliest token, which is what a chain would have
    accepted. `sums` are of the depths that are trained, which are the first ones and may be fewer: their mean is over the
    labels of those depths alone.
    """

    sums: Float[torch.Tensor, " trained_depth"]
    counts: Int[torch.Tensor, " depth"]
    hits: Int[torch.Tensor, "depth rank"]
    joint_hits: Int[torch.Tensor, " depth"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised, the same for every kind of drafter.

    p is known where a continuation keeps to the text, since the target has read that. Elsewhere it is taken to be one-hot at
    the label, where `reverse_kl`, which would be infinite, is -log q(label) too.
    """

    loss: LossKind = LossKind.cross_entropy
    weights: str = "uniform"
    """`reached` counts a label only where the drafter's arg-max was right at all depths before it: where decoding gets to."""
    head: nn.Linear | None = None
    """The target's head, frozen: what makes p of its hidden states. All losses but cross-entropy need it, with `full`."""
    teacher: str = "full"
    """`full`: p of all tokens. `top_k`: p of the likeliest ones that the batch holds, and of "any other" as one outcome more;
    q is lumped likewise. Lumping makes no divergence larger and no overlap smaller: what is minimised is a bound of the loss,
    exact where k is the whole vocabulary. How q divides the rest is left to it."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labelled draft tokens of a batch: `tokens[n, d]` at the n-th position and depth d, those that are `known`.

    `given[n, d]` is the token before it, which the drafter has read: at depth 0 the one that the target has already chosen.
    `text_index[n, d]` is where, among all batch x seq tokens, the text stands after that token, and `on_text` whether the
    continuation has kept to the text so far, so that the target's state there is that of the continuation.
    """

    given: Int[torch.Tensor, "position depth"]
    tokens: Int[torch.Tensor, "position depth"]
    known: Bool[torch.Tensor, "position depth"]
    text_index: Int[torch.Tensor, "position depth"]
    on_text: Bool[torch.Tensor, "position depth"]

    @classmethod
    def of(cls, batch: DrafterBatch) -> "Labels":
        """The labels at the batch's positions. Raises ValueError where they leave nothing to draft."""
        continuations = batch.continuations[batch.positions]  # [position, horizon]
        if continuations.shape[1] < 2:
            raise ValueError(
                f"labels of {continuations.shape[1]} token leave nothing to draft; distil with distill.horizon of at least 2"
            )
        row, column = batch.positions.nonzero(as_tuple=True)
        depth = torch.arange(1, continuations.shape[1], device=row.device)
        seq = batch.input_ids.shape[1]
        index = column[:, None] + depth  # [position, depth]: where token `given` stands, if the text says it
        text_index = row[:, None] * seq + index.clamp(max=seq - 1)
        given = continuations[:, :-1]
        in_text = batch.attention_mask.flatten()[text_index] & (index < seq)
        if batch.starts is not None:  # what follows in the row may be another text
            in_text &= batch.starts.flatten()[text_index] == batch.starts[batch.positions][:, None]
        says_so = (batch.input_ids.flatten()[text_index] == given) & in_text
        return cls(
            given=given,
            tokens=continuations[:, 1:],
            known=(continuations != UNKNOWN).cumprod(1).bool()[:, 1:],
            text_index=text_index,
            on_text=says_so.cumprod(1).bool(),
        )

    def first(self, num_depths: int) -> "Labels":
        """Those of the first depths only."""
        return Labels(**{field.name: getattr(self, field.name)[:, :num_depths] for field in fields(self)})


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """The target's tokens that a drafter's outputs stand for: all `size` of them, or some, in order of their ids."""

    size: int
    tokens: Int[torch.Tensor, " output"] | None = None

    @property
    def num_outputs(self) -> int:
        return self.size if self.tokens is None else len(self.tokens)

    def outputs(self, tokens: Int[torch.Tensor, " label"]) -> tuple[Int[torch.Tensor, " label"], Bool[torch.Tensor, " label"]]:
        """The outputs of the target's tokens, and which of them there are; some output stands in for the others."""
        if self.tokens is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        output = torch.searchsorted(self.tokens, tokens).clamp(max=len(self.tokens) - 1)
        found = self.tokens[output] == tokens
        return torch.where(found, output, 0), found


def commonest_tokens(token_counts: Int[torch.Tensor, " vocab"], count: int, vocab_size: int) -> Int[torch.Tensor, " output"]:
    """The `count` commonest tokens of the distilled data, in order of their ids: a reduced vocabulary.

    Raises ValueError where the counts are of another vocabulary.
    """
    if token_counts.shape != (vocab_size,):
        raise ValueError(f"token_counts is {tuple(token_counts.shape)}; the target has {vocab_size} tokens")
    return token_counts.topk(count).indices.sort().values


def require_draft_tokens(tokens: Int[torch.Tensor, " output"], vocab_size: int) -> None:
    """Raise ValueError unless a reduced vocabulary names different tokens of the target, in order."""
    if tokens[0] < 0 or tokens[-1] >= vocab_size or not (tokens[1:] > tokens[:-1]).all():
        raise ValueError(
            f"the drafter's draft_tokens must be different tokens of the target's {vocab_size}, in order; export it again"
        )


def score(
    predict: Callable[..., Float[torch.Tensor, "label output"]],
    inputs: tuple[Shaped[torch.Tensor, "label *_"], ...],
    labels: Labels,
    batch: DrafterBatch,
    objective: Objective,
    *,
    vocabulary: DraftVocabulary,
    trained_depths: int | None = None,
) -> Loss:
    """The loss of a drafter whose logits are `predict` of the rows of `inputs`: one per known label, position by position.

    A label outside a reduced vocabulary counts as a miss. It adds nothing to the sums where it is the teacher: in the
    cross-entropy, and in every loss off the text. Depths from `trained_depths` on have no sums, only counts and hits.
    """
    known = labels.known
    output, inside = vocabulary.outputs(labels.tokens[known])
    depth = torch.arange(known.shape[1], device=known.device).expand_as(known)[known]
    trained = depth < (known.shape[1] if trained_depths is None else trained_depths)
    judge = _Judge(predict=predict, objective=objective, teacher=_teacher(batch, objective, vocabulary))
    index, taught = labels.text_index[known], torch.zeros_like(trained)
    if judge.teacher is not None:
        taught = trained & labels.on_text[known] & judge.teacher.knows(index)
    rows = (output, inside, index, *inputs)
    # Labels of one kind together: only what the target's distribution teaches has to pay for it. Which kinds there are doesn't
    # depend on the labels: every process runs the same modules, and every parameter has a gradient.
    parts = [_judged(judge.by_label, trained & ~taught, rows, vocabulary.num_outputs)]
    if judge.teacher is not None:
        parts.append(_judged(judge.by_teacher, taught, rows, judge.width(vocabulary), order=index))
    if trained_depths is not None:
        parts.append(_judged(judge.by_rank, ~trained, rows, vocabulary.num_outputs))
    places, values = (torch.cat(each) for each in zip(*parts, strict=True))
    divergence, overlap, rank = values[places.argsort()].unbind(1)
    loss = _combine(divergence, overlap, objective.loss)
    ranks = torch.full(known.shape, float(HIT_RANKS), device=known.device).masked_scatter(known, rank.detach().float())
    if objective.weights == "reached":
        loss = loss * F.pad((ranks == 0).cumprod(1)[:, :-1], (1, 0), value=1)[known]
    return Loss(
        sums=torch.zeros(known.shape[1], device=loss.device, dtype=loss.dtype).index_add(0, depth, loss)[:trained_depths],
        counts=known.sum(0),
        hits=(ranks[:, :, None] <= torch.arange(HIT_RANKS, device=known.device)).sum(0),
        joint_hits=(ranks == 0).cumprod(1).sum(0),
    )


def _judged(
    evaluate: Callable[..., torch.Tensor],
    chosen: Bool[torch.Tensor, " label"],
    rows: tuple[torch.Tensor, ...],
    width: int,
    *,
    order: Int[torch.Tensor, " label"] | None = None,
) -> tuple[Int[torch.Tensor, " chosen"], Float[torch.Tensor, "chosen 3"]]:
    """Which labels were chosen, in the order of `order`, and what `evaluate` makes of their `rows`, chunk by chunk."""
    places = chosen.nonzero()[:, 0]
    if order is not None:
        places = places[order[places].argsort(stable=True)]
    elif len(places) == len(chosen):
        return places, _in_chunks(evaluate, rows, max(1, MAX_CHUNK // width))
    return places, _in_chunks(evaluate, tuple(each[places] for each in rows), max(1, MAX_CHUNK // width))


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """What single labels are worth: columns of divergence, overlap, and rank (HIT_RANKS for a label outside the vocabulary)."""

    predict: Callable[..., torch.Tensor]
    objective: Objective
    teacher: "Teacher | TopTeacher | None"

    def width(self, vocabulary: DraftVocabulary) -> int:
        """Columns of the widest tensor that the teacher makes."""
        return vocabulary.size if isinstance(self.teacher, Teacher) else vocabulary.num_outputs

    def by_label(self, output: torch.Tensor, inside: torch.Tensor, index: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        """Against the label itself."""
        logits, rank = _ranked(self.predict(*rows), output, inside)
        divergence = F.cross_entropy(logits, output, reduction="none") * inside
        # The overlap is 1 where the label is outside, so that no loss has a part for it.
        return torch.stack([divergence, divergence.neg().exp(), rank.to(divergence.dtype)], dim=1)

    def by_teacher(self, output: torch.Tensor, inside: torch.Tensor, index: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        """Against the target's distribution."""
        assert self.teacher is not None
        logits, rank = _ranked(self.predict(*rows), output, inside)
        p, log_q = self.teacher(index, logits.log_softmax(1))
        inside_p = p if not self.teacher.reduced else p / p.sum(1, keepdim=True).clamp(min=TINY)
        if self.objective.loss is LossKind.reverse_kl:
            divergence = (log_q.exp() * (log_q - inside_p.clamp(min=TINY).log())).sum(1)
        else:
            divergence = F.kl_div(log_q, inside_p, reduction="none").sum(1)
        overlap = torch.ones_like(divergence)
        if self.objective.loss.reads_overlap:  # two more tensors of all logits, and what their gradient keeps
            overlap = torch.minimum(p, log_q.exp()).sum(1)
        return torch.stack([divergence, overlap, rank.to(divergence.dtype)], dim=1)

    @torch.no_grad()
    def by_rank(self, output: torch.Tensor, inside: torch.Tensor, index: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        """Nothing but the rank."""
        _, rank = _ranked(self.predict(*rows), output, inside)
        return torch.stack([torch.zeros_like(rank), torch.ones_like(rank), rank], dim=1).float()


def _ranked(
    logits: Float[torch.Tensor, "label output"], output: Int[torch.Tensor, " label"], inside: Bool[torch.Tensor, " label"]
) -> tuple[Float[torch.Tensor, "label output"], Int[torch.Tensor, " label"]]:
    """The logits in float32, and how many outputs are likelier than the label's."""
    own = logits.detach()
    label = own.gather(1, output[:, None])
    rank = (own > label).sum(1, dtype=torch.int32)  # in 64 bits, the default, it takes twice as long
    if own.dtype != torch.float32:  # in 16 bits many are equal, and of equals the first one is the arg-max
        first = torch.arange(own.shape[1], device=own.device) < output[:, None]
        rank += ((own == label) & first).sum(1, dtype=torch.int32)
    return logits.float(), torch.where(inside, rank, HIT_RANKS)


def _teacher(batch: DrafterBatch, objective: Objective, vocabulary: DraftVocabulary) -> "Teacher | TopTeacher | None":
    if not objective.loss.needs_teacher:
        return None
    return (TopTeacher if objective.teacher == "top_k" else Teacher).of(batch, objective, vocabulary)


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The target's distribution after any token of the texts, made of its hidden states when asked for."""

    states: Float[torch.Tensor, "token hidden"]
    head: nn.Linear
    columns: Int[torch.Tensor, " output"] | None

    @property
    def reduced(self) -> bool:
        """Whether the drafter has outputs for some tokens only."""
        return self.columns is not None

    def knows(self, index: Int[torch.Tensor, " label"]) -> Bool[torch.Tensor, " label"]:
        """Where it has a distribution: everywhere."""
        return torch.ones_like(index, dtype=torch.bool)

    @classmethod
    def of(cls, batch: DrafterBatch, objective: Objective, vocabulary: DraftVocabulary) -> "Teacher":
        if objective.head is None or batch.hidden_states is None:
            raise ValueError(
                f"the loss {objective.loss} needs the target's head and hidden states; give both, or cross_entropy"
            )
        states = batch.hidden_states.flatten(0, 1)
        return cls(states=states, head=objective.head, columns=vocabulary.tokens)

    def __call__(
        self, index: Int[torch.Tensor, " label"], log_q: Float[torch.Tensor, "label output"]
    ) -> tuple[Float[torch.Tensor, "label output"], Float[torch.Tensor, "label output"]]:
        """p of the drafter's outputs, which with a reduced vocabulary sums to less than 1, and `log_q` as it is.

        Labels of neighbouring positions meet the same token of the text: side by side, they share its distribution.
        """
        with torch.no_grad():
            tokens, place = index.unique_consecutive(return_inverse=True)
            logits: torch.Tensor = self.head(self.states[tokens].to(self.head.weight.dtype))
            probs = logits.float().softmax(1)
            probs = probs if self.columns is None else probs[:, self.columns]
            return probs if len(tokens) == len(index) else probs[place], log_q


@dataclass(frozen=True, kw_only=True)
class TopTeacher:
    """The target's likeliest tokens after any token of the texts, as outputs of the drafter, and their probabilities.

    `inside` are those that a reduced vocabulary has. What it lacks of the rest nobody knows: all of it counts as inside. Where
    nothing is `known`, p is taken to be one-hot at the label, as off the text.
    """

    outputs: Int[torch.Tensor, "token top"]
    inside: Bool[torch.Tensor, "token top"]
    probs: Float[torch.Tensor, "token top"]
    known: Bool[torch.Tensor, " token"]
    reduced: bool

    def knows(self, index: Int[torch.Tensor, " label"]) -> Bool[torch.Tensor, " label"]:
        """Where likeliest tokens are stored."""
        return self.known[index]

    @classmethod
    def of(cls, batch: DrafterBatch, objective: Objective, vocabulary: DraftVocabulary) -> "TopTeacher":
        if batch.top_tokens is None or batch.top_log_probs is None:
            raise ValueError(
                "the teacher top_k needs the target's likeliest tokens, and the batch has none; distil with "
                "distill.top_logprobs, or train with train.teacher=full"
            )
        tokens = batch.top_tokens.flatten(0, 1).long()
        outputs, inside = vocabulary.outputs(tokens.clamp(min=0).flatten())
        probs = batch.top_log_probs.flatten(0, 1).float().exp()
        return cls(
            outputs=outputs.view_as(tokens),
            inside=inside.view_as(tokens),
            probs=probs,
            known=tokens[:, 0] != UNKNOWN,
            reduced=vocabulary.tokens is not None,
        )

    def __call__(
        self, index: Int[torch.Tensor, " label"], log_q: Float[torch.Tensor, "label output"]
    ) -> tuple[Float[torch.Tensor, "label outcome"], Float[torch.Tensor, "label outcome"]]:
        """p and log q of the likeliest tokens and, last, of any other."""
        probs, inside = self.probs[index], self.inside[index]
        top_log_q = log_q.gather(1, self.outputs[index])
        rest = (1 - probs.sum(1, keepdim=True)).clamp(min=LEAST_REST)
        rest_q = (1 - (top_log_q.exp() * inside).sum(1, keepdim=True)).clamp(min=LEAST_REST)
        log_q = torch.cat([top_log_q.masked_fill(~inside, math.log(TINY)), rest_q.log()], dim=1)
        return torch.cat([probs * inside, rest], dim=1), log_q


def _in_chunks(
    evaluate: Callable[..., torch.Tensor], rows: tuple[torch.Tensor, ...], size: int
) -> Float[torch.Tensor, "label column"]:
    """`evaluate` of all rows, `size` at a time. Of several chunks nothing is kept but the result: backward computes anew."""
    if len(rows[0]) <= size:
        return evaluate(*rows)
    chunks = zip(*(each.split(size) for each in rows), strict=True)
    return torch.cat([checkpoint(evaluate, *chunk, use_reentrant=False) for chunk in chunks])


def _combine(
    divergence: Float[torch.Tensor, " label"], overlap: Float[torch.Tensor, " label"], loss: LossKind
) -> Float[torch.Tensor, " label"]:
    if not loss.reads_overlap:
        return divergence
    direct = 1 - overlap if loss.is_total_variation else -overlap.clamp(min=TINY).log()
    if not loss.is_blend:
        return direct
    share = overlap.detach()
    return share * direct + (1 - share) * divergence
