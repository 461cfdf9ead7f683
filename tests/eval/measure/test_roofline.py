"""The roofline: the bytes that a step reads, and the measured memory bandwidth."""

from typing import Any

import pytest
import torch
from torch import nn

from outrider.eval.measure import environment
from outrider.eval.measure.environment import (
    MAX_ACCELERATOR_BYTES,
    NUM_QUEUED_READS,
    cache_bytes,
    measure_bandwidth,
    measure_roofline,
    weight_bytes,
)
from outrider.eval.records.run_files import Roofline
from outrider.models.llm.hf_target import HFTarget


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.layer = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 100, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_an_embedding_counts_one_row_unless_it_is_the_head() -> None:
    assert weight_bytes(Tied(tied=False)) == 4 * (8 + 8 * 8 + 8 * 100)
    assert weight_bytes(Tied(tied=True)) == 4 * (8 * 8 + 8 * 100)


def test_half_precision_halves_the_bytes() -> None:
    assert weight_bytes(Tied(tied=True).bfloat16()) == 2 * (8 * 8 + 8 * 100)


def test_measured_bandwidth_is_plausible(tiny_target: HFTarget) -> None:
    measured = measure_roofline(tiny_target)
    assert 0.05 < measured.bandwidth_gbs < 100_000
    assert measured.tokens_per_second == pytest.approx(1e9 * measured.bandwidth_gbs / measured.weight_bytes)


def test_the_cache_size_is_a_number_or_marked_as_unknown() -> None:
    size = cache_bytes(torch.device("cpu"))
    assert size is None or 1 << 15 <= size <= 1 << 34
    assert not Roofline(weight_bytes=1, bandwidth_gbs=1.0, cache_bytes=None, streamed=False).fits_in_cache


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the accelerator by a fake one and return its operations in order.

    Its tensors are empty. Two consecutive events are 40 ms apart.
    """
    done: list[str] = []

    class Event:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            done.append(f"event on {stream}")

        def elapsed_time(self, end: "Event") -> float:
            assert done[-1] == "wait", "the last event hasn't come yet"
            return 40.0

    def noted(name: str, operation: Any) -> Any:
        return lambda *tensors: (done.append(name), operation(*tensors))[1]

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: done.append("wait"))
    monkeypatch.setattr(torch, "mv", noted("read", torch.mv))
    monkeypatch.setattr(torch.linalg, "vector_norm", noted("read", torch.linalg.vector_norm))
    return done


def test_an_accelerator_is_timed_by_its_events_over_many_reads(timeline: list[str]) -> None:
    """A single read timed by the host would include a launch, a copy and a wait."""
    device = torch.device("meta")
    bandwidth = measure_bandwidth(1 << 40, device)
    assert bandwidth == pytest.approx(MAX_ACCELERATOR_BYTES / (0.040 / NUM_QUEUED_READS) / 1e9)
    event, reads = "event on stream of meta", ["read"] * NUM_QUEUED_READS
    assert timeline == ["read", "wait", event, *reads, event, "wait"] * 2
    assert measure_bandwidth(1 << 22, device) == pytest.approx((1 << 22) / 0.004 / 1e9), "of small weights: their own size"


@pytest.mark.usefixtures("timeline")
def test_a_buffer_is_halved_until_it_fits_into_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = torch.ones
    sizes: list[int] = []

    def ones(*shape: int, device: torch.device) -> torch.Tensor:
        tensor = allocate(*shape, device=device)
        sizes.append(tensor.nbytes)
        if tensor.nbytes > 1 << 30:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tensor

    monkeypatch.setattr(torch, "ones", ones)
    assert measure_bandwidth(1 << 40, torch.device("meta")) == pytest.approx((1 << 30) / 0.004 / 1e9)
    assert sizes[:3] == [1 << 32, 1 << 31, 1 << 30]
    monkeypatch.setattr(environment, "LEAST_BUFFER_BYTES", 1 << 33)
    with pytest.raises(torch.OutOfMemoryError):
        measure_bandwidth(1 << 40, torch.device("meta"))
