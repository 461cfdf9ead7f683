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

META = torch.device("meta")
SECONDS = 4e-3 + 1e-3 / NUM_QUEUED_READS
"""Of one read of the accelerator below."""


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
def reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the accelerator by one whose tensors are empty, and which takes 4 ms for a read and 1 ms to wait."""
    now = [0.0]

    def take(seconds: float, operation: Any = None) -> Any:
        return lambda *tensors: (now.__setitem__(0, now[0] + seconds), operation and operation(*tensors))[1]

    monkeypatch.setattr(environment.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.accelerator, "synchronize", take(1e-3))
    monkeypatch.setattr(torch, "mv", take(4e-3, torch.mv))
    monkeypatch.setattr(torch.linalg, "vector_norm", take(4e-3, torch.linalg.vector_norm))


@pytest.mark.usefixtures("reads")
def test_an_accelerator_is_timed_over_many_reads() -> None:
    """A single read would include a wait."""
    assert measure_bandwidth(1 << 40, META) == pytest.approx(MAX_ACCELERATOR_BYTES / SECONDS / 1e9)
    assert measure_bandwidth(1 << 22, META) == pytest.approx((1 << 22) / SECONDS / 1e9), "of small weights: their own size"


@pytest.mark.usefixtures("reads")
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
    assert measure_bandwidth(1 << 40, META) == pytest.approx((1 << 30) / SECONDS / 1e9)
    assert sizes[:3] == [1 << 32, 1 << 31, 1 << 30]
    monkeypatch.setattr(environment, "LEAST_BUFFER_BYTES", 1 << 33)
    with pytest.raises(torch.OutOfMemoryError):
        measure_bandwidth(1 << 40, META)
