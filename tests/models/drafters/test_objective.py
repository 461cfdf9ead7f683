"""The losses that all drafters share, against a loop over single labels."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from outrider.data.types import UNKNOWN, DrafterBatch
from outrider.models.drafters import scoring
from outrider.models.drafters.labels import Labels, dpace_weights
from outrider.models.drafters.losses import WEIGHTS, LossKind
from outrider.models.drafters.objective import HIT_RANKS, LOSS_DECAY, Loss, Objective
from outrider.models.drafters.scoring import LabelRows, logits_and_rank, score
from outrider.models.drafters.vocabulary import DraftVocabulary

VOCAB, WIDTH = 11, 6
TEXT = [[3, 4, 5, 6, 7, 8], [9, 1, 2, 0, 0, 0]]
# After position 1 of the first text the continuation repeats the text. Elsewhere it leaves the
# text, at once or later.
CONTINUATIONS = {(0, 1): [5, 6, 7, 8], (0, 2): [6, 1, 2, UNKNOWN], (1, 0): [5, 5, UNKNOWN, UNKNOWN], (1, 1): [2, 4, 4, 4]}
WHOLE = DraftVocabulary(size=VOCAB)
HIDDEN = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def batch() -> DrafterBatch:
    continuations = torch.full((2, 6, 4), UNKNOWN)
    positions = torch.zeros(2, 6, dtype=torch.bool)
    for position, tokens in CONTINUATIONS.items():
        continuations[position] = torch.tensor(tokens)
        positions[position] = True
    return DrafterBatch(
        input_ids=torch.tensor(TEXT),
        attention_mask=torch.tensor([[True] * 6, [True] * 3 + [False] * 3]),
        positions=positions,
        continuations=continuations,
        hidden_states=HIDDEN,
    )


@pytest.fixture
def labels(batch: DrafterBatch) -> Labels:
    return Labels.of(batch)


@pytest.fixture
def rows(labels: Labels) -> torch.Tensor:
    return drafter_rows(labels)


@pytest.fixture
def heads() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(1)
    return nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False), nn.Linear(WIDTH, VOCAB, bias=False)


def drafter_rows(labels: Labels) -> torch.Tensor:
    return torch.randn(*labels.known.shape, WIDTH, generator=torch.Generator().manual_seed(2))


def slow_loss(kind: LossKind, q: list[float], p: list[float] | None, label_q: float) -> float:
    """Compute the loss of a label whose probability is `label_q`; without p, p is one-hot there."""
    if kind == "cross_entropy":
        return -math.log(label_q)
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) if p else -math.log(label_q)
    overlap = sum(map(min, p, q)) if p else label_q
    return {"kl": kl, "kl_acceptance": overlap * -math.log(overlap) + (1 - overlap) * kl}[kind]


@pytest.mark.parametrize("kind", LossKind)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_losses_equal_those_of_a_loop_over_the_labels(kind, weights, heads, batch, labels, rows):
    target_head, head = heads
    objective = Objective(loss=kind, weights=weights, head=target_head)
    actual = score(head, (rows,), labels, batch, objective, vocabulary=WHOLE)
    rows = rows[labels.known]

    entries, row = [], 0  # depth, q, p, label, weight
    for (text, position), tokens in sorted(CONTINUATIONS.items()):
        known = range(min(3, [*tokens, UNKNOWN].index(UNKNOWN) - 1))
        confidence = [(1 + head(rows[row + depth]).softmax(0)[tokens[depth + 1]].item()) / 2 for depth in known]
        for depth in range(3):
            if UNKNOWN in tokens[: depth + 2]:
                break
            q = head(rows[row]).softmax(0).tolist()
            row += 1
            following = TEXT[text][position + 1 : position + 2 + depth]
            p = (
                target_head(HIDDEN[text, position + 1 + depth]).softmax(0).tolist()
                if following == tokens[: depth + 1]
                else None
            )
            weight = sum(math.prod(confidence[: last + 1]) for last in known[depth:]) if weights == "dpace" else 1
            entries.append((depth, q, p, tokens[depth + 1], weight))
    assert sum(p is not None for _, _, p, _, _ in entries) == 5, "three depths of the first, one each of two others"
    sums = [0.0] * 3
    for depth, q, p, label, weight in entries:
        sums[depth] += slow_loss(kind, q, p, q[label]) * weight
    assert actual.sums.tolist() == pytest.approx(sums, rel=1e-4)
    assert actual.counts.tolist() == [4, 3, 2]


def dense_loss(
    kind: LossKind, q: torch.Tensor, p: torch.Tensor | None, label: int | None, inside: torch.Tensor
) -> torch.Tensor:
    """Compute one label's loss as `LossKind` defines it, from dense vectors over the drafter's outputs.

    `p` covers the target's whole vocabulary, and `inside` are the tokens of the outputs. `label` is
    an output, or None for a token without one.
    """
    entropy = q.sum() * 0 if label is None else -q[label].log()
    if kind == "cross_entropy":
        return entropy
    if p is None:
        kl, overlap = entropy, (-entropy).exp()
    else:
        within = p[inside] / p[inside].sum()
        kl, overlap = (within * (within / q).log()).sum(), torch.minimum(p[inside], q).sum()
    return kl if kind == "kl" else overlap.detach() * -overlap.log() + (1 - overlap.detach()) * kl


@pytest.mark.parametrize("vocabulary", [None, [1, 2, 4, 5, 7, 8]])
@pytest.mark.parametrize("kind", LossKind)
def test_the_gradient_is_that_of_a_dense_formula(kind, vocabulary, heads, batch, labels):
    target_head, _ = heads
    torch_dtype = torch.float64
    outputs = DraftVocabulary(size=VOCAB, tokens=None if vocabulary is None else torch.tensor(vocabulary))
    inside = torch.arange(VOCAB) if vocabulary is None else torch.tensor(vocabulary)
    torch.manual_seed(3)
    head, rows = nn.Linear(WIDTH, outputs.num_outputs), drafter_rows(labels).requires_grad_()
    score(head, (rows,), labels, batch, Objective(loss=kind, head=target_head), vocabulary=outputs).sums.sum().backward()

    slow_rows = rows.detach()[labels.known].to(torch_dtype).requires_grad_()
    weight, bias = (tensor.detach().to(torch_dtype).requires_grad_() for tensor in (head.weight, head.bias))
    total, row, num_with_teacher = torch.zeros((), dtype=torch_dtype), 0, 0
    for (text, position), tokens in sorted(CONTINUATIONS.items()):
        for depth in range(3):
            if UNKNOWN in tokens[: depth + 2]:
                break
            q, row = (weight @ slow_rows[row] + bias).softmax(0), row + 1
            follows = TEXT[text][position + 1 : position + 2 + depth] == tokens[: depth + 1]
            state = HIDDEN[text, min(position + 1 + depth, 5)].to(torch_dtype)
            p = (target_head.weight.to(torch_dtype) @ state).softmax(0) if follows else None
            label = inside.tolist().index(tokens[depth + 1]) if tokens[depth + 1] in inside else None
            num_with_teacher += follows
            total = total + dense_loss(kind, q, p, label, inside)
    assert num_with_teacher == 5
    assert row == len(slow_rows) > 5, "labels without a teacher too"
    total.backward()
    assert not rows.grad[~labels.known].any()
    for actual, expected in ((rows.grad[labels.known], slow_rows), (head.weight.grad, weight), (head.bias.grad, bias)):
        torch.testing.assert_close(actual.to(torch_dtype), expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LossKind)
@pytest.mark.parametrize("vocabulary", [None, [1, 2, 4, 5, 7, 8]])
def test_chunks_change_neither_loss_nor_gradient(kind, vocabulary, heads, monkeypatch, batch, labels):
    target_head, _ = heads
    tokens = None if vocabulary is None else torch.tensor(vocabulary)
    outputs = DraftVocabulary(size=VOCAB, tokens=tokens)
    results = []
    for limit in (2**26, 2 * VOCAB, 1):
        monkeypatch.setattr(scoring, "max_chunk", lambda device, limit=limit: limit)
        torch.manual_seed(3)
        head, rows = nn.Linear(WIDTH, outputs.num_outputs), drafter_rows(labels).requires_grad_()
        objective = Objective(loss=kind, head=target_head)
        loss = score(head, (rows,), labels, batch, objective, vocabulary=outputs)
        loss.sums.sum().backward()
        results.append((loss.sums.detach(), loss.hits, head.weight.grad, rows.grad))
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert torch.allclose(actual.float(), expected.float(), atol=1e-5)
    assert results[0][3].abs().sum() > 0


@pytest.mark.parametrize("kind", LossKind)
def test_a_loss_does_not_depend_on_padding(kind, heads):
    """The padding is token 0, which may also be a token of a continuation."""
    target_head, head = heads
    text, hidden = torch.tensor([[3, 4, 5]]), torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(4))
    continuations = torch.tensor([[[UNKNOWN] * 4, [5, 0, 0, 0], [0, 0, 0, 7]]])
    losses = []
    for padding in (0, 4):
        pad = torch.nn.functional.pad
        batch = DrafterBatch(
            input_ids=pad(text, (0, padding)),
            attention_mask=pad(torch.ones_like(text, dtype=torch.bool), (0, padding)),
            positions=pad(torch.tensor([[False, True, True]]), (0, padding)),
            continuations=pad(continuations, (0, 0, 0, padding), value=UNKNOWN),
            hidden_states=pad(hidden, (0, 0, 0, padding)),
        )
        labels = Labels.of(batch)
        objective = Objective(loss=kind, head=target_head)
        loss = score(head, (drafter_rows(labels),), labels, batch, objective, vocabulary=WHOLE)
        losses.append(loss.sums.tolist())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("kind", LossKind)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_loss_does_not_depend_on_how_a_step_is_split(kind, weights, heads, batch, labels, rows):
    target_head, head = heads
    objective, vocabulary = Objective(loss=kind, weights=weights, head=target_head), DraftVocabulary(size=VOCAB)
    whole = score(head, (rows,), labels, batch, objective, vocabulary=vocabulary).sums
    parts = torch.zeros(3)
    for position in range(len(labels.tokens)):
        of_part = slice(position, position + 1)
        part = Labels(**{name: getattr(labels, name)[of_part] for name in Labels.__dataclass_fields__})
        parts += score(head, (rows[of_part],), part, batch, objective, vocabulary=vocabulary).sums
    torch.testing.assert_close(parts, whole)


def test_dpace_weights_are_shares_of_the_expected_length() -> None:
    q = torch.tensor([[0.5, 0.2, 1.0], [0.9, 0.6, 0.3]])
    known = torch.tensor([[True, True, True], [True, True, False]])
    weights = dpace_weights(q.log(), known)
    one, two, three = 0.75, 0.6, 1.0  # half of the probability, and the floor of a half
    assert weights[0].tolist() == pytest.approx([one + one * two + one * two * three, one * two + one * two * three, one * two])
    assert weights[1].tolist() == pytest.approx([0.95 + 0.95 * 0.8, 0.95 * 0.8, 0.0]), "an unknown label adds nothing"


def test_dpace_replaces_the_decay_of_depths():
    counts = torch.ones(2, dtype=torch.long)
    loss = Loss(sums=torch.ones(2), counts=counts, hits=counts[:, None], joint_hits=counts)
    assert loss.decayed(Objective()).sums.tolist() == pytest.approx([1.0, LOSS_DECAY])
    assert loss.decayed(Objective(weights="dpace")).sums.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", LossKind)
@pytest.mark.parametrize("teacher", ["full", "top_k"])
def test_a_label_outside_the_draft_vocabulary_adds_no_loss_as_a_teacher(kind, teacher, heads, batch, labels):
    """Each would add the constant -log TINY, which would dominate the reported loss."""
    target_head, _ = heads
    teacher_batch = batch if teacher == "full" else with_top(batch, target_head, 3)
    outside = [token for token in range(VOCAB) if token not in {1, 4, 5}]
    vocabulary = DraftVocabulary(size=VOCAB, tokens=torch.tensor(outside))
    head, rows = nn.Linear(WIDTH, len(outside)), drafter_rows(labels)
    off_text = replace(labels, on_text=torch.zeros_like(labels.on_text))
    objective = Objective(loss=kind, head=target_head, teacher=teacher)
    hidden = torch.isin(labels.tokens, torch.tensor([1, 4, 5])) & labels.known
    assert 0 < hidden.sum() < labels.known.sum()
    losses = [
        score(head, (rows,), replace(off_text, known=kept), teacher_batch, objective, vocabulary=vocabulary)
        for kept in (labels.known, labels.known & ~hidden)
    ]
    torch.testing.assert_close(losses[0].sums, losses[1].sums)
    assert (losses[0].counts - losses[1].counts).tolist() == hidden.sum(0).tolist(), "they are misses all the same"


@pytest.mark.parametrize("many_outputs", [scoring.MANY_OUTPUTS, HIT_RANKS])
def test_of_equal_logits_only_the_first_is_a_hit(heads, many_outputs, monkeypatch, batch, labels):
    """In 16 bits many logits are equal.

    If all of them counted as hits, training would report more accepted tokens than decoding has.
    """
    monkeypatch.setattr(scoring, "MANY_OUTPUTS", many_outputs)
    tied = torch.zeros(*labels.known.shape, VOCAB, dtype=torch.bfloat16)
    loss = score(lambda rows: rows, (tied,), labels, batch, Objective(), vocabulary=WHOLE)
    tokens = labels.tokens[labels.known].tolist()
    assert loss.hits.sum(0).tolist() == [sum(token <= rank for token in tokens) for rank in range(10)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ranks_among_the_largest_logits_are_those_among_all(dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, 64, generator=generator).mul(4).to(dtype)
    values = values.round() if dtype == torch.bfloat16 else values  # many are equal
    output = torch.randint(0, 64, (300,), generator=generator)
    rows = LabelRows(output, torch.ones(300, dtype=torch.bool), output, (values,))
    among_all = logits_and_rank(lambda logits: logits, rows)[1].clamp(max=HIT_RANKS)
    monkeypatch.setattr(scoring, "MANY_OUTPUTS", HIT_RANKS)
    among_largest = logits_and_rank(lambda logits: logits, rows)[1].clamp(max=HIT_RANKS)
    assert torch.equal(among_largest, among_all)
    assert set(among_all.tolist()) == set(range(HIT_RANKS + 1))


def test_the_targets_head_is_applied_once_to_each_token_of_the_text(heads, batch, labels):
    """The head is as large as the drafter's, and neighbouring positions share their tokens."""
    target_head, head = heads
    num_rows: list[int] = []
    target_head.register_forward_hook(lambda module, args, output: num_rows.append(len(args[0])))
    objective = Objective(loss=LossKind.kl, head=target_head)
    score(head, (drafter_rows(labels),), labels, batch, objective, vocabulary=WHOLE)
    on_text = labels.on_text & labels.known
    met = labels.text_index[on_text].tolist()
    assert sum(num_rows) == len(set(met)) < len(met) < int(labels.known.sum())


def with_top(batch: DrafterBatch, target_head: nn.Linear, k: int) -> DrafterBatch:
    """Replace the batch's hidden states by the target's likeliest tokens, as in shards."""
    log_probs = target_head(batch.hidden_states).log_softmax(-1)
    values, tokens = log_probs.topk(k)
    padding = ~batch.attention_mask[:, :, None]
    return replace(
        batch,
        hidden_states=None,
        top_tokens=tokens.int().masked_fill(padding, UNKNOWN),
        top_log_probs=values.masked_fill(padding, -math.inf),
    )


@pytest.mark.parametrize("kind", LossKind)
@pytest.mark.parametrize("vocabulary", [None, [1, 2, 4, 5, 7, 8]])
def test_top_k_of_the_whole_vocabulary_equals_the_full_teacher(kind, vocabulary, heads, batch, labels):
    target_head, _ = heads
    outputs = DraftVocabulary(size=VOCAB, tokens=None if vocabulary is None else torch.tensor(vocabulary))
    results = []
    for teacher, teacher_batch in (("full", batch), ("top_k", with_top(batch, target_head, VOCAB))):
        torch.manual_seed(3)
        head, rows = nn.Linear(WIDTH, outputs.num_outputs), drafter_rows(labels).requires_grad_()
        objective = Objective(loss=kind, head=target_head, teacher=teacher)
        loss = score(head, (rows,), labels, teacher_batch, objective, vocabulary=outputs)
        loss.sums.sum().backward()
        results.append((loss.sums.detach(), loss.hits.float(), head.weight.grad, rows.grad))
    assert results[0][3].abs().sum() > 0
    for full, top in zip(*results, strict=True):
        torch.testing.assert_close(top, full, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [LossKind.kl, LossKind.kl_acceptance])
def test_the_top_k_teacher_treats_all_other_tokens_as_one_outcome(kind, heads, batch, labels, rows):
    """The expected loss is a loop over k + 1 outcomes, and a lower bound of the full loss."""
    target_head, head = heads
    k = 3

    def loss_sums(teacher: str, teacher_batch: DrafterBatch) -> list[float]:
        objective = Objective(loss=kind, head=target_head, teacher=teacher)
        return score(head, (rows,), labels, teacher_batch, objective, vocabulary=WHOLE).sums.tolist()

    known_rows, sums, row = rows[labels.known], [0.0] * 3, 0
    for (text, position), tokens in sorted(CONTINUATIONS.items()):
        for depth in range(3):
            if UNKNOWN in tokens[: depth + 2]:
                break
            q, row = head(known_rows[row]).softmax(0).detach(), row + 1
            label_q = q[tokens[depth + 1]].item()
            if TEXT[text][position + 1 : position + 2 + depth] == tokens[: depth + 1]:
                p = target_head(HIDDEN[text, position + 1 + depth]).softmax(0)
                top = p.argsort(descending=True)[:k].tolist()
                lumped = [[float(probs[token]) for token in top] for probs in (q, p)]
                q, p = ([*probs, 1 - sum(probs)] for probs in lumped)
                sums[depth] += slow_loss(kind, q, p, label_q)
            else:
                sums[depth] += slow_loss(kind, q.tolist(), None, label_q)
    top = loss_sums("top_k", with_top(batch, target_head, k))
    assert top == pytest.approx(sums, rel=1e-4)
    if kind == "kl":
        full = loss_sums("full", batch)
        assert all(ours <= theirs + 1e-5 for ours, theirs in zip(top, full, strict=True))
        assert sum(top) < sum(full) - 0.01


@pytest.mark.parametrize("kind", LossKind)
def test_a_drafter_certain_of_the_top_k_tokens_has_a_finite_gradient(kind, heads, batch, labels):
    """In float32 the probability of all other tokens is then 0, whose logarithm is not finite."""
    target_head, _ = heads
    teacher_batch = with_top(batch, target_head, 2)
    logits = torch.full((*labels.known.shape, VOCAB), -100.0)
    logits.scatter_(2, teacher_batch.top_tokens.flatten(0, 1)[labels.text_index].long().clamp(min=0), 100.0)
    logits.requires_grad_()
    objective = Objective(loss=kind, teacher="top_k")
    loss = score(lambda rows: rows, (logits,), labels, teacher_batch, objective, vocabulary=WHOLE)
    loss.sums.sum().backward()
    assert loss.sums.isfinite().all()
    assert logits.grad.isfinite().all()


def test_without_stored_top_tokens_the_label_is_the_teacher(heads, batch, labels, rows):
    """The teacher must not be a distribution with all its mass on "any other token"."""
    target_head, head = heads
    teacher_batch = with_top(batch, target_head, 3)
    nothing = replace(teacher_batch, top_tokens=torch.full_like(teacher_batch.top_tokens, UNKNOWN))
    top = Objective(loss=LossKind.kl, teacher="top_k")
    losses = [score(head, (rows,), labels, nothing, objective, vocabulary=WHOLE).sums for objective in (top, Objective())]
    assert torch.equal(*losses)
    with pytest.raises(ValueError, match=r"the teacher top_k needs the target's top-k tokens.*distill\.top_logprobs"):
        score(head, (rows,), labels, batch, top, vocabulary=WHOLE)


def test_a_loss_against_the_target_needs_its_head(heads, batch, labels):
    objective = Objective(loss=LossKind.kl)
    with pytest.raises(ValueError, match="the loss kl needs the target's head"):
        score(heads[1], (drafter_rows(labels),), labels, batch, objective, vocabulary=WHOLE)


@pytest.mark.parametrize(("field", "names"), [("weights", "uniform, dpace"), ("teacher", "full, top_k")])
def test_a_misspelt_objective_is_an_error(field: str, names: str) -> None:
    with pytest.raises(ValueError, match=f"no {field} 'dpcae'; choose one of {names}"):
        Objective(**{field: "dpcae"})
