"""Properties of every registered drafter, trained on a few texts, saved and loaded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.types import UNKNOWN, DrafterBatch
from outrider.models.decoding import (
    DraftTree,
    GreedyAcceptance,
    Prompts,
    RowSeeds,
    Sampling,
    SpeculativeSampling,
    TypicalAcceptance,
    generate,
)
from outrider.models.drafters import (
    DRAFTERS,
    TRAINING_FREE,
    NullDrafter,
    build_drafter,
    load_drafter,
    parse_drafter,
    save_drafter,
)
from outrider.models.drafters.base import TrainableDrafter
from outrider.models.drafters.eagle import Eagle
from outrider.models.drafters.losses import LossKind
from outrider.models.drafters.objective import Loss, Objective
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ..host_reads import HostReads, ScalarReads, decide_at_once

# Small options of each kind, with drafts of up to HORIZON - 1 tokens. A new kind needs a row here.
# A row whose name is not its kind has the kind as an option.
OPTIONS: dict[str, dict[str, Any]] = {
    "block": {"block": 4, "width": 3, "tree_nodes": 8},
    "block-lattice": {"kind": "block", "block": 4, "correction": "markov", "rank": 8, "tree_nodes": 8},
    "block-one-slot": {"kind": "block", "num_slots": 1, "depth": 5, "width": 3, "tree_nodes": 8},
    "draft_model": {"num_layers": 1},
    "draft_tree": {"kind": "draft_model", "num_layers": 1, "hidden_size": 16, "top_k": 3, "tree_nodes": 8},
    "eagle": {"depth": 4, "top_k": 3, "tree_nodes": 8},
    "eagle3": {"depth": 4, "top_k": 3, "tree_nodes": 8},
    "eagle3.1": {"kind": "eagle3", "fc_norm": True, "norm_output": True, "depth": 4, "top_k": 3, "tree_nodes": 8},
    "medusa": {"tree_nodes": 8},
    "medusa-shared": {"kind": "medusa", "share_head": True, "num_layers": 2},
    "mtp": {"init": "random", "depth": 4, "top_k": 3, "tree_nodes": 8},
    "mtp-before-norm": {"kind": "mtp", "init": "random", "norm_output": False, "depth": 4, "top_k": 3, "tree_nodes": 8},
    "redrafter": {"beam_width": 3, "beam_length": 4, "tree_nodes": 8},
}
ROW_KINDS: dict[str, str] = {name: options.get("kind", name) for name, options in OPTIONS.items()}
"""The kind of each row."""
FROM_RANDOM: dict[str, dict[str, Any]] = {
    name: options | ({"init": "random"} if ROW_KINDS[name] in {"block", "draft_model", "eagle", "eagle3"} else {})
    for name, options in OPTIONS.items()
}
"""The same for a target whose layers a drafter can't copy."""
FREE: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"tree_nodes": 5},
    "recycling": {"tree_nodes": 12, "top_k": 3},
    "suffix": {"tree_nodes": 8},
}
"""Small options of each training-free drafter."""
GROWING = "growing"
MERGED: dict[str, str] = {GROWING: "expected", "merged-expected": "expected", "merged-fixed": "fixed"}
"""The pace of each merge: of a draft model alone, and of a ReDrafter and training-free drafters."""
PARTS = ("suffix", "recycling")
"""What is merged with a ReDrafter."""
VARIANTS = {
    "block-lattice",
    "block-one-slot",
    "draft_tree",
    "eagle3.1",
    "medusa-shared",
    "mtp-before-norm",
}
"""Rows that are slow tests: their kinds have another row."""
HORIZON = 5
STEPS = 60
LEARNING_RATE = 2e-2
NUM_NEW = 16
MEMORISED = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]
UNSEEN = [[70, 71], [5, 6, 7]]
PROMPTS = [*MEMORISED, *UNSEEN]


def test_every_registered_kind_is_tested_here():
    assert {options.get("kind", name) for name, options in OPTIONS.items()} == DRAFTERS.keys()
    assert FREE.keys() == TRAINING_FREE.keys()


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> HFTarget:
    """Load the target in float64, where tree attention and plain decoding have equal arg-maxes."""
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float64"), torch.device("cpu"))


@dataclass(frozen=True)
class Answers:
    """Tokens and numbers of accepted draft tokens of each row."""

    tokens: list[list[int]]
    num_accepted: list[list[int]]
    num_left: int
    """Number of rows in the last step."""


def answer(target, drafter, prompts, rule=None, *, stop_ids=(), generator=None) -> Answers:
    tokens: list[list[int]] = [[] for _ in prompts]
    num_accepted: list[list[int]] = [[] for _ in prompts]
    texts = [torch.tensor(prompt) for prompt in prompts]
    options = {"max_new_tokens": NUM_NEW, "stop_ids": stop_ids, "generator": generator}
    for step in generate(target, drafter, rule or GreedyAcceptance(), texts, **options):
        for row, new, accepted in zip(step.rows, step.tokens, step.num_accepted, strict=True):
            tokens[row] += new
            num_accepted[row] += [] if step.is_prefill else [accepted]
    return Answers(tokens, num_accepted, len(step.rows))


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    """Return the target's greedy answers."""
    return [answer(target, NullDrafter(), [prompt]).tokens[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def batch(target, plain) -> DrafterBatch:
    """Distil the memorised texts; continuations of greedy texts are the texts themselves."""
    texts = [[*prompt, *tokens] for prompt, tokens in zip(MEMORISED, plain, strict=False)]
    seq = max(map(len, texts))
    input_ids = torch.zeros(len(texts), seq, dtype=torch.long)
    continuations = torch.full((len(texts), seq, HORIZON), UNKNOWN)
    for row, (prompt, text) in enumerate(zip(MEMORISED, texts, strict=True)):
        input_ids[row, : len(text)] = torch.tensor(text)
        for column in range(len(prompt) - 1, len(text) - 1):
            known = text[column + 1 : column + 1 + HORIZON]
            continuations[row, column, : len(known)] = torch.tensor(known)
    attention_mask = torch.arange(seq) < torch.tensor([[len(text)] for text in texts])
    return DrafterBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        positions=continuations[:, :, 0] != UNKNOWN,
        continuations=continuations,
        hidden_states=target.hidden_states(input_ids)[0].float(),
    )


def make(kind: str, target: HFTarget, batch: DrafterBatch) -> tuple[TrainableDrafter, DrafterBatch]:
    """Make a fresh drafter, and the batch with the target's states that it reads."""
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": kind, **OPTIONS[kind]}), target).train()
    if drafter.wants_token_counts:
        tokens = batch.continuations[batch.continuations != UNKNOWN]
        drafter.choose_draft_vocabulary(tokens.bincount(minlength=target.vocab_size))
    values = {name: getattr(batch, name) for name in DrafterBatch.__dataclass_fields__}
    if drafter.feature_layers:
        _, features = target.hidden_states(batch.input_ids, drafter.feature_layers)
        assert features is not None
        values["features"] = features.float()
    return drafter, DrafterBatch(**values)


@dataclass(frozen=True)
class Trained:
    """A trained drafter in the target's dtype, and the folder where it was saved."""

    drafter: TrainableDrafter
    folder: Path
    loss: Loss

    def load(self, target: HFTarget) -> Any:
        return load_drafter(self.folder, target)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else []) for name in sorted(OPTIONS)],
)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def trained(kind, train) -> Trained:
    return train(kind)


@pytest.fixture(scope="module")
def train(target, batch, tmp_path_factory) -> Callable[[str], Trained]:
    """Return a function that trains each kind once."""
    return cache(lambda kind: train_one(kind, target, batch, tmp_path_factory.mktemp(kind)))


def fit(drafter: TrainableDrafter, batch: DrafterBatch, num_steps: int = STEPS) -> None:
    """Train a drafter on one batch."""
    optimizer = torch.optim.AdamW(
        [parameter for parameter in drafter.parameters() if parameter.requires_grad], lr=LEARNING_RATE
    )
    for _ in range(num_steps):
        loss = drafter.loss(batch, Objective())
        optimizer.zero_grad()
        (loss.sums.sum() / loss.counts.sum()).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()


def train_one(kind: str, target: HFTarget, batch: DrafterBatch, folder: Path) -> Trained:
    drafter, batch = make(kind, target, batch)
    fit(drafter, batch)
    drafter.eval()
    with torch.no_grad():
        loss = drafter.loss(batch, Objective())
    drafter.calibrate(loss)
    save_drafter(drafter, folder, target.identity)
    return Trained(drafter.to(target.dtype), folder, loss)


NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else []) for name in sorted({**OPTIONS, **FREE, **MERGED})
]


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    """Return a trainable kind, or the name of a training-free drafter or of a merge."""
    return request.param


@pytest.fixture
def drafter(name, train, target) -> Any:
    return make_ready(name, train, target)


def make_ready(name: str, train: Callable[[str], Trained], target: HFTarget) -> Any:
    """Return a training-free drafter, one trained on the memorised prompts, or a merge of both."""
    if name in MERGED:
        kind, added = ("draft_model", ()) if name == GROWING else ("redrafter", PARTS)
        parts = "+".join([str(train(kind).folder), *added])
        options = {part: FREE[part] for part in added}
        return load_drafter(parts, target, pace=MERGED[name], tree_nodes=12, **options)
    return load_drafter(name, target, **FREE[name]) if name in FREE else train(name).load(target)


@pytest.fixture(params=[*NAMES, *(pytest.param(f"fresh {kind}", marks=pytest.mark.slow) for kind in sorted(OPTIONS))])
def either(request, train, target, batch) -> Any:
    """Return the drafter of `drafter`, or a fresh one, mostly wrong."""
    fresh, _, name = request.param.rpartition(" ")
    if fresh:
        return make(name, target, batch)[0].to(target.dtype).eval()
    return make_ready(name, train, target)


# --- training


def test_a_drafter_reads_only_the_states_that_it_declares(kind, target, batch):
    """Otherwise training would fail if only the declared states are stored."""
    drafter, full_batch = make(kind, target, batch)
    needed = replace(
        full_batch,
        hidden_states=full_batch.hidden_states if drafter.reads_hidden_states else None,
        features=full_batch.features if drafter.feature_layers else None,
    )
    assert drafter.loss(needed, Objective()).counts.sum() > 0
    if drafter.reads_hidden_states:
        with pytest.raises(ValueError, match="distil them or recompute them"):
            drafter.loss(replace(full_batch, hidden_states=None), Objective())


# --- decoding


def test_greedy_answers_are_plain_decodings(either, target, plain):
    for order in ([0, 1, 2, 3, 4], [2]):
        assert answer(target, either, [PROMPTS[row] for row in order]).tokens == [plain[row] for row in order]


@pytest.mark.quick_cases(12)
def test_rows_leave_the_batch_and_the_others_continue(drafter, target, plain):
    stop = next(token for token in plain[0][4:] if len({token in tokens for tokens in plain}) == 2)
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in plain]
    assert len({len(tokens) for tokens in expected}) > 1, "all rows end together"
    actual = answer(target, drafter, PROMPTS, stop_ids={stop})
    assert actual.tokens == expected
    assert actual.num_left < len(PROMPTS)


@pytest.mark.quick_cases(12)
def test_a_row_in_a_batch_decodes_as_it_does_alone(drafter, name, target):
    rule = SpeculativeSampling(sampling=Sampling(temperature=0.1))  # near zero, samples are texts that drafters know
    stop_ids = set(range(60, 70))  # rows leave one by one
    by_seconds = MERGED.get(name) == "expected"  # or by the steps before

    def sampled(rows: list[int]) -> list[Any]:
        prompts = [PROMPTS[row] for row in rows]
        answers = answer(target, drafter, prompts, rule, stop_ids=stop_ids, generator=RowSeeds(rows))
        return list(zip(answers.tokens, [None] * len(rows) if by_seconds else answers.num_accepted, strict=True))

    alone = [sampled([row])[0] for row in range(len(PROMPTS))]
    assert len({len(tokens) for tokens, _ in alone}) > 1, "all rows end together"
    assert by_seconds or any(any(accepted) for _, accepted in alone)
    for order in ([0, 1, 2, 3, 4], [3, 2, 2, 0]):
        assert sampled(order) == [alone[row] for row in order]


def test_with_the_same_seeds_plain_decoding_samples_the_same(either, target):
    rule, seeds = SpeculativeSampling(sampling=Sampling(temperature=1.3, top_p=0.95)), range(10, 15)
    plain = answer(target, NullDrafter(), PROMPTS, rule, generator=RowSeeds(seeds))
    actual = answer(target, either, PROMPTS, rule, generator=RowSeeds(seeds))
    assert actual.tokens == plain.tokens


def test_typical_acceptance_gives_complete_answers(drafter, target):
    rule = TypicalAcceptance(sampling=Sampling(temperature=0.7))
    actual = answer(target, drafter, PROMPTS, rule, generator=RowSeeds(range(len(PROMPTS))))
    assert [len(tokens) for tokens in actual.tokens] == [NUM_NEW] * len(PROMPTS)
    assert any(map(any, actual.num_accepted))


def test_a_step_has_one_host_read_and_a_training_free_one_few_more(drafter, name, target, monkeypatch):
    """Token Recycling reads the target's choices as well.

    So does a merge with it, and the trained drafter's search. Its first steps are trials, which ask
    all parts. A growing tree reads each draft pass.
    """
    decide_at_once(monkeypatch)
    num_passes: list[int] = []
    if name == GROWING:
        read = drafter.merge.read
        drafter.merge.read = lambda *arguments: num_passes.append(1) or read(*arguments)
    num_reads = {GROWING: 1, "recycling": 2}.get(name, 3 if name in MERGED else 1)
    steps = generate(target, drafter, GreedyAcceptance(), [torch.tensor(prompt) for prompt in UNSEEN], max_new_tokens=NUM_NEW)
    next(steps)
    next(steps)
    num_steps = 0
    for _ in range(3):
        num_passes.clear()
        with HostReads() as reads, ScalarReads() as scalars:
            next(steps)
        assert [read for read in reads.names if read != "item"] == ["tolist"] * (num_reads + len(num_passes))
        assert scalars.count == 0
        num_steps += 1
    assert num_steps == 3


# --- training


@pytest.mark.quick_cases(6)
def test_training_overfits_to_near_perfect_acceptance_and_decoding_accepts(trained, target):
    loss = trained.loss
    assert len(loss.joint_hits) == HORIZON - 1
    depth = len(loss.sums)  # the deepest that is trained
    assert depth == (1 if isinstance(trained.drafter, Eagle) else HORIZON - 1)
    assert int(loss.joint_hits[depth - 1]) >= 0.95 * int(loss.counts[depth - 1]) > 0
    accepted = [count for row in answer(target, trained.load(target), MEMORISED).num_accepted for count in row]
    assert len(accepted) >= len(MEMORISED)
    assert sum(accepted) / len(accepted) >= 0.75 * depth


@torch.inference_mode()
def first_draft(target: HFTarget, drafter: Any) -> DraftTree:
    prompts = Prompts.of([torch.tensor(prompt) for prompt in PROMPTS])
    prefill = target.prefill(prompts, max_new_tokens=4, max_nodes=drafter.max_nodes, feature_layers=drafter.feature_layers)
    state = drafter.init_state(prompts, prefill, max_new_tokens=8)
    return drafter.propose(state, prefill.logits[:, -1].argmax(-1))[0]


def test_a_saved_drafter_loads_bit_for_bit_and_drafts_the_same(trained, target):
    loaded = trained.load(target)
    for name, tensor in trained.drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    before, after = first_draft(target, trained.drafter), first_draft(target, loaded)
    assert before.num_nodes == after.num_nodes > 0
    assert torch.equal(before.tokens, after.tokens)
    assert torch.equal(before.parents, after.parents)


@pytest.mark.parametrize(("loss", "weights"), [*((loss, "uniform") for loss in LossKind), (LossKind.kl, "dpace")])
def test_every_objective_has_a_finite_gradient(kind, target, batch, loss, weights):
    drafter, batch = make(kind, target, batch)
    result = drafter.loss(batch, Objective(loss=loss, weights=weights, head=target.head))
    assert 0 < len(result.sums) <= len(result.counts) == len(result.joint_hits)
    assert (result.hits[:, 0] >= result.joint_hits).all()
    result.sums.sum().backward()
    gradients = {name: parameter.grad for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    assert gradients
    assert [name for name, gradient in gradients.items() if gradient is None or not gradient.isfinite().all()] == []
    assert any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize("horizon", [2, 3, HORIZON])
def test_a_drafter_announces_parameters_without_a_gradient(kind, target, batch, horizon, with_labels):
    """DDP looks for unused parameters only if the drafter announces them.

    Otherwise it would wait forever for a gradient that is missing in some processes.
    """
    drafter, batch = make(kind, target, batch)
    try:
        drafter.require_horizon(drafter.config, horizon)
    except ValueError:
        pytest.skip("this kind can't be trained on such labels")
    positions = batch.positions if with_labels else torch.zeros_like(batch.positions)
    batch = replace(batch, positions=positions, continuations=batch.continuations[:, :, :horizon])
    drafter.loss(batch, Objective(loss=LossKind.kl, head=target.head)).sums.sum().backward()
    missing = [name for name, parameter in drafter.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert bool(missing) == drafter.has_unused_parameters(horizon), missing


def test_texts_without_labels_have_zero_loss_and_gradient(kind, target, batch):
    drafter, batch = make(kind, target, batch)
    result = drafter.loss(replace(batch, positions=torch.zeros_like(batch.positions)), Objective())
    assert not result.counts.any()
    assert not result.sums.any()
    result.sums.sum().backward()
    assert not any(parameter.grad.any() for parameter in drafter.parameters() if parameter.grad is not None)


def test_the_targets_parameters_are_neither_trained_nor_saved(kind, target, batch):
    drafter, batch = make(kind, target, batch)
    memory = {tensor.data_ptr() for tensor in target.model.parameters()}
    owned = {**dict(drafter.named_parameters()), **drafter.state_dict()}
    assert [name for name, tensor in owned.items() if tensor.data_ptr() in memory] == []
    before = [tensor.clone() for tensor in target.model.parameters()]
    optimizer = torch.optim.SGD(drafter.parameters(), lr=1.0)
    drafter.loss(batch, Objective(loss=LossKind.kl, head=target.head)).sums.sum().backward()
    optimizer.step()
    for parameter, value in zip(target.model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, value)
