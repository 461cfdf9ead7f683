"""Waiting for a device, and running out of its memory: the same on every kind of accelerator, and free on a CPU."""

import pytest
import torch

from outrider.models.decoding.loop import Stopwatch
from outrider.models.machine import is_out_of_memory, release_memory, synchronize


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """What an accelerator that isn't there was asked for."""
    made: list[tuple[str, str | None]] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: made.append(("wait", str(device))))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: made.append(("empty", None)))
    return made


@pytest.mark.parametrize("name", ["cuda:1", "mps", "xpu"])
def test_a_stopwatch_waits_for_every_kind_of_accelerator(name: str, calls: list[tuple[str, str | None]]) -> None:
    lap = Stopwatch(torch.device(name))
    assert calls == [], "nothing is measured yet"
    assert lap() >= 0
    assert lap() >= 0
    assert calls == [("wait", name)] * 2
    synchronize(torch.device(name))
    release_memory(torch.device(name))
    assert calls[2:] == [("wait", name), ("empty", None)]


def test_a_cpu_is_never_waited_for(calls: list[tuple[str, str | None]]) -> None:
    cpu = torch.device("cpu")
    Stopwatch(cpu)()
    synchronize(cpu)
    release_memory(cpu)
    assert calls == []


def test_memory_that_ran_out_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GiB)"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("MPS backend out of memory"))
