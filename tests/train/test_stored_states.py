"""Training on stored states of the target, and on recomputed ones if they are missing."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.shards import label_store
from outrider.data.states import StoredStates, encode_states
from outrider.data.types import DistilledExample, TargetReads, TopTokens
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters.losses import LossKind
from outrider.models.drafters.objective import Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.train.batches import BatchStream, target_reads, with_hidden_states
from outrider.train.config import TrainConfig
from outrider.train.records import read_records

from .conftest import DRAFTER, Run, write_shards
from .test_run import weights

RunTrain = Callable[..., Run]
EAGLE3 = {"kind": "eagle3", "feature_layers": [1, 0]}
EAGLE, MEDUSA = {"kind": "eagle", "feature_noise": 0.1}, {"kind": "medusa", "num_heads": 3}
BLOCK = {"kind": "block", "feature_layers": [0, 1], "block": 3}
DRAFT_MODEL = {"kind": "draft_model", "init": "target_layers", "num_layers": 1}


def with_states(examples: list[DistilledExample], target: HFTarget, dtype: str | None = None) -> list[DistilledExample]:
    """Add all states that can be stored to the examples, by default exactly in float32."""
    stored = []
    for example in examples:
        ids = example.example.input_ids[None]
        hidden_states, features = target.hidden_states(ids, (0, 1))
        assert features is not None
        last, *layers = (
            StoredStates(values=states) if dtype is None else encode_states(states, dtype)
            for states in (hidden_states[0], *features[0].split(target.hidden_size, -1))
        )
        values, tokens = target.head(hidden_states[0]).log_softmax(-1).topk(target.vocab_size)
        top = TopTokens(tokens=tokens, log_probs=values)
        stored.append(replace(example, hidden_states=last, layers=dict(enumerate(layers)), top=top))
    return stored


@pytest.fixture(scope="module")
def stored(examples: list[DistilledExample], target: HFTarget) -> list[DistilledExample]:
    return with_states(examples, target)


@pytest.fixture(scope="module")
def stored_dir(stored: list[DistilledExample], target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("stored"), target.identity, stored)


def losses(run: Run) -> list[float]:
    """Return the losses of every step.

    Weights are no good comparison: Adam amplifies the sign of gradients near zero.
    """
    return [record["loss"] for record in read_records(run.train_dir / "metrics.jsonl")]


def largest_difference(left: Run, right: Run) -> float:
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def forbid_passes(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid passes of the target over texts during training; earlier ones test the head."""
    for name in ("read_texts", "layer_inputs"):
        monkeypatch.setattr(target, name, lambda *args, **kwargs: pytest.fail("the target was run"))


@pytest.mark.parametrize("drafter", [EAGLE3, pytest.param(DRAFTER, marks=pytest.mark.slow)], ids=lambda d: d["kind"])
def test_nothing_is_recomputed_if_all_states_are_stored(drafter, run_train, stored_dir, target, monkeypatch, caplog):
    recomputed = run_train("recomputed", replace_drafter=drafter, steps=3)
    caplog.clear()  # messages of the first run
    forbid_passes(target, monkeypatch)
    with caplog.at_level(logging.INFO, logger="outrider"):
        spared = run_train("stored", replace_drafter=drafter, shards=stored_dir, steps=3)
    assert "recomputes them" not in caplog.text
    assert largest_difference(recomputed, spared) < 1e-4


@pytest.mark.slow
def test_layers_that_are_not_all_stored_are_recomputed_with_a_message(run_train, stored, target, tmp_path, caplog):
    some = [replace(example, layers={1: example.layers[1]}) for example in stored]
    directory = write_shards(tmp_path / "shards", target.identity, some)
    with caplog.at_level(logging.INFO, logger="outrider"):
        partly = run_train("partly", replace_drafter=EAGLE3, shards=directory, steps=3)
    assert "recomputes them in every step" in caplog.text
    assert "distill.feature_layers=[1,0]" in caplog.text
    assert "feature_layers [1]" in caplog.text
    assert "distill.features" not in caplog.text, "the hidden states, which are there, aren't even read"
    assert largest_difference(partly, run_train("recomputed", replace_drafter=EAGLE3, steps=3)) < 1e-4


def test_the_target_recomputes_only_missing_states(shards_dir, stored, target, tmp_path):
    marked = [
        replace(example, layers={}, hidden_states=StoredStates(values=example.hidden_states.values + 7))
        for example in stored
        if example.hidden_states is not None
    ]
    directory = write_shards(tmp_path / "shards", target.identity, marked)
    reads = TargetReads(hidden_states=True, layers=(1,))
    (batch,) = stream(directory, reads).batches(0)
    (plain,) = stream(shards_dir, reads).batches(0)
    actual, expected = with_hidden_states(batch, target, reads), with_hidden_states(plain, target, reads)
    text = batch.attention_mask
    torch.testing.assert_close(actual.hidden_states[text], expected.hidden_states[text] + 7)
    torch.testing.assert_close(actual.features[text], expected.features[text])


def stream(shards_dir: Path, reads: TargetReads) -> BatchStream:
    config = TrainConfig(steps=10, batch_size=4)
    return BatchStream(shards_dir, label_store(shards_dir).load(), config, rank=0, num_processes=1, reads=reads)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("drafter", [DRAFTER, MEDUSA, EAGLE, EAGLE3, BLOCK], ids=lambda drafter: drafter["kind"])
def test_states_in_bfloat16_give_the_loss_of_the_same_states_in_float32(drafter, autocast, shards_dir, target):
    """A drafter casts what it reads, so a batch needs no copy in float32."""
    objective = Objective(loss=LossKind.kl, head=target.head)
    torch.manual_seed(0)
    module = build_drafter(parse_drafter(drafter), target).train()
    (batch,) = stream(shards_dir, reads := target_reads(module, objective)).batches(0)
    filled = with_hidden_states(batch, target, reads)
    results = []
    for cast in (torch.Tensor.bfloat16, lambda states: states.bfloat16().float()):
        states = {name: getattr(filled, name) for name in ("hidden_states", "features")}
        narrow = replace(filled, **{name: None if value is None else cast(value) for name, value in states.items()})
        torch.manual_seed(1)  # of the noise that EAGLE adds
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = module.loss(narrow, objective)
        loss.sums.sum().backward()
        results.append([loss.sums.detach(), *(item.grad for item in module.parameters() if item.grad is not None)])
    assert len(results[0]) > 2
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_fewer_bits_give_nearly_the_same_loss(dtype, examples, shards_dir, target, tmp_path):
    directory = write_shards(tmp_path / "shards", target.identity, with_states(examples, target, dtype))
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter(EAGLE3), target)
    reads = target_reads(drafter, Objective())
    actual = []
    for folder in (shards_dir, directory):
        (batch,) = stream(folder, reads).batches(0)
        actual.append(drafter.loss(with_hidden_states(batch, target, reads), Objective()).sums.sum().item())
    assert actual[0] != actual[1]
    assert actual[1] == pytest.approx(actual[0], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "drafter"), [("kl", EAGLE3), ("kl_acceptance", DRAFTER)], ids=["kl", "kl_acceptance"])
def test_training_on_likeliest_tokens_equals_training_on_hidden_states(
    loss: str,
    drafter: dict[str, Any],
    run_train: RunTrain,
    stored_dir: Path,
    target: HFTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here k is the whole vocabulary; an EAGLE-3 then needs no last hidden states."""
    full = run_train("full", replace_drafter=drafter, loss=loss, steps=3)
    forbid_passes(target, monkeypatch)
    top = run_train("top", replace_drafter=drafter, loss=loss, teacher="top_k", shards=stored_dir, steps=3)
    assert losses(top) == pytest.approx(losses(full), rel=5e-3)
    assert losses(run_train("labels", replace_drafter=drafter, shards=stored_dir, steps=3)) != pytest.approx(
        losses(full), rel=0.1
    )


def test_validation_uses_the_whole_distribution(run_train: RunTrain, stored_dir: Path) -> None:
    """Validation reads the target's answers, for which no likeliest tokens are stored."""
    run = run_train("top", loss="kl", teacher="top_k", shards=stored_dir, validation_texts=4, validation_tokens=8, steps=3)
    assert (run.drafter_dir / "model.safetensors").exists()


def test_a_teacher_that_is_not_stored_is_refused_before_training(run_train, shards_dir, monkeypatch):
    with pytest.raises(ValueError, match=r"train\.teacher is top_k.*distill\.top_logprobs"):
        run_train(loss="kl", teacher="top_k")
    run_train("labels_alone", teacher="top_k")  # this loss needs no teacher
    with pytest.raises(ValueError, match="teacher\n *must be one of full, top_k"):
        run_train(teacher="half")


def test_the_states_to_read_follow_from_drafter_and_objective(target: HFTarget) -> None:
    def reads(drafter: dict[str, Any], loss: str = "cross_entropy", teacher: str = "full") -> TargetReads:
        return target_reads(build_drafter(parse_drafter(drafter), target), Objective(loss=LossKind(loss), teacher=teacher))

    assert reads(EAGLE3) == TargetReads(layers=(1, 0))
    assert reads(EAGLE3, loss="kl") == TargetReads(hidden_states=True, layers=(1, 0))
    assert reads(EAGLE3, loss="kl", teacher="top_k") == TargetReads(layers=(1, 0), top=True)
    assert reads(DRAFTER, loss="kl", teacher="top_k") == TargetReads(hidden_states=True, top=True)
    assert reads(DRAFT_MODEL) == TargetReads()
