"""Detection of spikes, losses far above the earlier ones."""

import json
import statistics

import pytest
import torch

from outrider.models.drafters.objective import Loss
from outrider.train.spikes import LEAST, WINDOW, SpikeWatch

from ..host_reads import HostReads, ScalarReads


def loss_of(mean: float, labels: int = 4) -> Loss:
    """Make a loss with mean `mean` over the labels of its two trained depths (of three)."""
    return Loss(
        sums=torch.tensor([mean * labels, mean * labels]),
        counts=torch.tensor([labels, labels, 1000]),
        hits=torch.zeros(3, 1, dtype=torch.long),
        joint_hits=torch.zeros(3, dtype=torch.long),
    )


def fed(losses: list[float], threshold: float | None = 10.0) -> SpikeWatch:
    watch = SpikeWatch(threshold)
    for step, mean in enumerate(losses):
        watch.add_step(step, loss_of(mean, labels=1 + step % 3))
    return watch


def noisy(count: int, start: float = 3.0, end: float = 2.0) -> list[float]:
    """Make falling losses with noise of standard deviation 0.1."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(count, generator=generator)
    return (torch.linspace(start, end, count) + noise).tolist()


def test_the_step_of_a_spike_is_found_with_its_loss_and_its_bound_and_only_once() -> None:
    losses = noisy(60)
    losses[40] = 7.0
    losses[50] = 9.0
    watch = fed(losses)
    spike = watch.take()
    assert spike is not None
    assert (spike.step, spike.num_spikes) == (40, 2)
    assert spike.loss == pytest.approx(7.0)
    median = statistics.median(losses[:40])
    deviation = 1.4826 * statistics.median(abs(loss - median) for loss in losses[:40])
    assert spike.bound == pytest.approx(median + 10 * deviation, rel=1e-4)
    assert watch.take() is None


@pytest.mark.parametrize("losses", [noisy(3 * WINDOW), noisy(3 * WINDOW, 9.0, 0.5), [2.0] * 50 + [2.1] * 50])
def test_noise_and_a_falling_loss_and_a_small_step_are_no_spikes(losses: list[float]) -> None:
    assert fed(losses).take() is None


def test_no_spike_is_reported_before_enough_losses_or_if_off() -> None:
    assert fed([2.0] * (LEAST - 1) + [100.0]).take() is None
    assert fed([2.0] * LEAST + [100.0]).take() is not None
    assert fed([2.0] * LEAST + [100.0], threshold=None).take() is None


def test_a_loss_that_is_not_finite_is_left_to_the_other_check() -> None:
    assert fed([2.0] * LEAST + [float("nan"), float("inf"), 2.0]).take() is None


def test_a_resumed_watch_finds_the_same() -> None:
    losses = noisy(2 * WINDOW + 10)
    losses[-1] = 3.2
    whole = fed(losses, threshold=3.0)
    broken = fed(losses[: WINDOW + 50], threshold=3.0)
    spikes = [broken.take()]
    state = json.loads(json.dumps(broken.state_dict()))
    resumed = SpikeWatch(3.0)
    resumed.load_state_dict(state)
    for step in range(WINDOW + 50, len(losses)):
        resumed.add_step(step, loss_of(losses[step], labels=1 + step % 3))
    spikes.append(resumed.take())
    first = whole.take()
    assert whole.state_dict() == resumed.state_dict()
    assert first is not None
    reported = [spike for spike in spikes if spike is not None]
    assert first.num_spikes == sum(spike.num_spikes for spike in reported)
    # The bound has the same bits only if the same losses are in the window.
    assert (first.step, first.loss, first.bound) == (reported[0].step, reported[0].loss, reported[0].bound)


def test_no_step_waits_for_the_device() -> None:
    watch, loss = fed([2.0] * WINDOW), loss_of(50.0)
    with HostReads() as reads, ScalarReads() as scalars:
        for step in range(WINDOW, WINDOW + 3):
            watch.add_step(step, loss)
    assert reads.names == []
    assert scalars.count == 0
    assert watch.take() is not None
