"""Copies of the training state, and random states."""

import gc
import mmap
import random

import numpy as np
import pytest
import torch

from outrider.train.state import HostCopy, page_locked_like, random_state, set_random_state


def test_a_copy_keeps_values_kinds_and_nesting_and_shares_no_memory() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2).T)  # not contiguous
    state = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": weight}}, "groups": [{"betas": (0.9, 0.99), "params": [0]}]}
    copy = HostCopy()(state)
    before = weight.detach().clone()
    weight.data.zero_()
    assert torch.equal(copy["state"][0]["exp_avg"], before)
    assert not copy["state"][0]["exp_avg"].requires_grad
    assert copy["groups"] == state["groups"]
    assert type(copy["groups"][0]["betas"]) is tuple


def test_the_next_copy_takes_the_same_memory_unless_a_shape_has_changed() -> None:
    copy, state = HostCopy(), {"a": torch.ones(4), "b": torch.ones(4)}
    first = copy(state)
    second = copy({"a": torch.zeros(4), "b": torch.zeros(5)})
    assert second["a"].data_ptr() == first["a"].data_ptr() != second["b"].data_ptr()
    assert first["b"].tolist() == [1.0] * 4
    assert second["b"].tolist() == [0.0] * 5


class FakeCudart:
    """Replacement for CUDA's runtime that records page-locked memory."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.locked[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        del self.locked[address]
        return 0


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, ()), (torch.bfloat16, (33, 1025)), (torch.bool, (3,))])
def test_page_locked_memory_has_the_bytes_of_the_tensor_and_pages_of_its_own(shape, dtype, monkeypatch):
    """PyTorch's own allocation is rounded up to a power of two.

    Pages that two tensors share can't be locked twice.
    """
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    values = torch.ones(shape, dtype=dtype)
    room, other = page_locked_like(values), page_locked_like(values)
    assert (room.shape, room.dtype, room.untyped_storage().nbytes()) == (values.shape, dtype, values.nbytes)
    assert cudart.locked == {tensor.data_ptr(): values.nbytes for tensor in (room, other)}
    assert all(address % mmap.PAGESIZE == 0 for address in cudart.locked)
    part = room.copy_(values).flatten()[:1]
    del room, other
    gc.collect()
    assert list(cudart.locked) == [part.data_ptr()], "memory stays locked as long as it is used, and no longer"
    assert part.tolist() == [1]
    del part
    gc.collect()
    assert not cudart.locked


def test_memory_that_cannot_be_locked_stays_pageable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(error=2))
    room = page_locked_like(torch.ones(3))
    assert room.copy_(torch.ones(3)).tolist() == [1, 1, 1]
    assert "12 bytes for checkpoints can't be page-locked (CUDA error 2)" in caplog.text
    assert room.untyped_storage().nbytes() == 12


def test_every_random_generator_is_restored() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]

    np.random.randn()
    state = random_state(torch.device("cpu"))
    drawn = draw()
    assert draw() != drawn
    set_random_state(state, torch.device("cpu"))
    assert draw() == drawn
