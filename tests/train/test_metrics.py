"""Metrics of training, against hand-computed means."""

import json

import pytest
import torch

from outrider.models.drafters.objective import Loss
from outrider.train import metrics as metrics_module
from outrider.train.metrics import Meter, add_losses, estimate_tokens_per_step, summarize


def make_loss(scale: int = 1) -> Loss:
    return Loss(
        sums=torch.tensor([8.0, 1.0, 0.0]) * scale,
        counts=torch.tensor([4, 2, 0]) * scale,
        hits=torch.tensor([[3, 4], [1, 2], [0, 0]]) * scale,
        joint_hits=torch.tensor([3, 1, 0]) * scale,
    )


def test_tokens_per_step_divides_each_depth_by_its_own_labels() -> None:
    assert estimate_tokens_per_step(torch.tensor([3, 1]), torch.tensor([4, 2])) == 2.25
    assert estimate_tokens_per_step(torch.tensor([3, 1, 0]), torch.tensor([4, 2, 0])) == 2.25, "no label, no evidence"
    assert estimate_tokens_per_step(torch.tensor([4, 4]), torch.tensor([4, 4])) == 3.0


def test_tokens_per_step_is_joint_and_not_a_product_of_accuracies() -> None:
    # Half of the positions are right at both depths, the others at none: a chain has 2 or 0
    # accepted tokens, 1 on average. The product of the accuracies would give 0.5 + 0.25.
    assert estimate_tokens_per_step(torch.tensor([2, 2]), torch.tensor([4, 4])) == 2.0


def test_means_are_over_labels_and_missing_where_there_is_none() -> None:
    means = summarize(make_loss())
    assert means["loss"] == 9 / 6
    assert means["loss_by_depth"] == [2.0, 0.5, None]
    assert means["accuracy_by_depth"] == [[0.75, 1.0], [0.5, 1.0], [None, None]]
    assert summarize(add_losses(make_loss(), make_loss(3))) == means


def test_the_loss_is_a_mean_over_the_labels_of_the_trained_depths() -> None:
    loss = Loss(**{**_fields(make_loss()), "sums": torch.tensor([8.0])})
    for means in (summarize(loss), summarize(add_losses(loss, loss))):
        assert means["loss"] == 2.0
        assert means["loss_by_depth"] == [2.0]
        assert means["accuracy_by_depth"] == summarize(make_loss())["accuracy_by_depth"]


def test_a_record_covers_the_steps_since_the_last_one() -> None:
    meter = Meter(torch.device("cpu"))
    for step in range(2):
        meter.add_step(step, make_loss(step + 1), torch.tensor(1.0), torch.tensor([4, 10]))
    first = meter.record()
    assert first["loss"] == 1.5
    assert (first["positions_seen"], first["tokens_seen"]) == (8, 20)
    meter.add_step(
        2, Loss(**{**_fields(make_loss()), "sums": torch.tensor([0.0, 0.0, 0.0])}), torch.tensor(1.0), torch.tensor([1, 1])
    )
    second = meter.record()
    assert second["loss"] == 0.0
    assert second["positions_seen"] == 9
    assert meter.first_bad_step() is None


def _fields(loss: Loss) -> dict[str, torch.Tensor]:
    return {name: getattr(loss, name) for name in ("sums", "counts", "hits", "joint_hits")}


def test_speeds_cover_the_steps_since_the_last_record_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: now)
    meter = Meter(torch.device("cpu"))
    meter.add_step(0, make_loss(), torch.tensor(1.0), torch.tensor([4, 10]))
    now += 2
    assert meter.record()["tokens_per_second"] == 5.0
    restored = Meter(torch.device("cpu"))
    restored.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    with restored.paused():
        now += 60
    restored.add_step(1, make_loss(), torch.tensor(1.0), torch.tensor([4, 30]))
    now += 1
    record = restored.record()
    assert (record["tokens_per_second"], record["positions_per_second"], record["seconds"]) == (30.0, 4.0, 3.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_first_step_with_a_bad_loss_or_gradient_is_recorded(value: float) -> None:
    meter = Meter(torch.device("cpu"))
    meter.add_step(0, make_loss(), torch.tensor(1.0), torch.tensor([1, 1]))
    meter.add_step(1, make_loss(), torch.tensor(value), torch.tensor([1, 1]))
    bad = Loss(**{**_fields(make_loss()), "sums": torch.tensor([value, 0.0, 0.0])})
    meter.add_step(2, bad, torch.tensor(1.0), torch.tensor([1, 1]))
    assert meter.first_bad_step() == 1


def test_the_meters_state_is_restored_bit_for_bit_through_json() -> None:
    meter = Meter(torch.device("cpu"))
    loss = Loss(**{**_fields(make_loss()), "sums": torch.tensor([1 / 3, 2e-30, 1e20])})
    meter.add_step(0, loss, torch.tensor(1.0), torch.tensor([4, 10]))
    restored = Meter(torch.device("cpu"))
    restored.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    for one_meter in (meter, restored):
        one_meter.add_step(1, loss, torch.tensor(1.0), torch.tensor([4, 10]))
    records = [meter.record(), restored.record()]
    for record in records:
        del record["seconds"], record["positions_per_second"], record["tokens_per_second"]
    assert records[0] == records[1]


def test_measured_values_do_not_depend_on_records_or_interruptions() -> None:
    unbroken = Meter(torch.device("cpu"), last_from=2)
    for step in range(4):
        unbroken.add_step(step, make_loss(step + 1), torch.tensor(1.0), torch.tensor([1, 1]))
        unbroken.record()
    assert unbroken.last_losses is not None
    assert unbroken.last_losses.counts.tolist() == [4 * (3 + 4), 2 * (3 + 4), 0]
    meter = Meter(torch.device("cpu"), last_from=2)
    for step in range(4):
        meter.add_step(step, make_loss(step + 1), torch.tensor(1.0), torch.tensor([1, 1]))
        state = json.loads(json.dumps(meter.state_dict()))
        meter = Meter(torch.device("cpu"), last_from=2)
        meter.load_state_dict(state)
    assert meter.last_losses is not None
    for name, value in _fields(unbroken.last_losses).items():
        assert torch.equal(_fields(meter.last_losses)[name], value)


def test_a_state_of_three_numbers_is_restored_and_counts_on() -> None:
    """Checkpoints once counted a third kind of positions."""
    meter = Meter(torch.device("cpu"))
    meter.load_state_dict({**Meter(torch.device("cpu")).state_dict(), "seen": [4, 10, 0]})
    meter.add_step(1, make_loss(), torch.tensor(1.0), torch.tensor([4, 30]))
    record = meter.record()
    assert (record["positions_seen"], record["tokens_seen"]) == (8, 40)
