"""Synchronization and out-of-memory errors on every kind of accelerator.

On a CPU there is nothing to wait for.
"""

import json
from itertools import pairwise

import pytest
import torch

from outrider.models.decoding.loop import Stopwatch
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target
from outrider.models.llm.tree_cache import extent_step
from outrider.models.machine import (
    MAX_CHAINED_ERRORS,
    find_out_of_memory,
    is_emulated,
    is_for_users,
    is_out_of_memory,
    release_memory,
    synchronize,
    turn_off_cudnn_attention,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Replace calls to the accelerator; return the list of the recorded calls."""
    recorded: list[tuple[str, str | None]] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: recorded.append(("wait", str(device))))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: recorded.append(("empty", None)))
    return recorded


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


def test_a_cpu_is_never_synchronized(calls: list[tuple[str, str | None]]) -> None:
    cpu = torch.device("cpu")
    Stopwatch(cpu)()
    synchronize(cpu)
    release_memory(cpu)
    assert calls == []


def test_out_of_memory_errors_are_distinguished_from_others() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GiB)"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("MPS backend out of memory"))


def test_cudnns_attention_is_turned_off_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN plans again for each length of a text: tens of milliseconds per decoding step."""
    switched: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    turn_off_cudnn_attention(torch.device("cpu"))
    turn_off_cudnn_attention(torch.device("mps"))
    assert not switched
    turn_off_cudnn_attention(torch.device("cuda:1"))
    assert switched == [False]
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    turn_off_cudnn_attention(torch.device("cuda"))
    assert switched == [False], "it is off already"


def test_loading_a_target_turns_cudnns_attention_off_for_its_device(tiny_target_dir, monkeypatch):
    devices: list[torch.device] = []
    monkeypatch.setattr("outrider.models.llm.loading.turn_off_cudnn_attention", devices.append)
    load_target(TargetConfig(name_or_path=str(tiny_target_dir)), torch.device("cpu"))
    assert devices == [torch.device("cpu")]


@pytest.mark.parametrize("is_native", [False, True])
def test_a_target_in_a_type_that_the_processor_lacks_is_loaded_with_a_warning(
    is_native: bool, tiny_target_dir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_native)
    for dtype in ("float32", "bfloat16"):
        load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype=dtype), torch.device("cpu"))
    assert caplog.text.count("no instructions for bfloat16") == caplog.text.count("no instructions") == (not is_native)
    assert not is_emulated(torch.bfloat16, torch.device("cuda")), "accelerators aren't asked"


@pytest.mark.parametrize("name", ["cuda", "xpu", "mps"])
def test_key_lengths_are_rounded_up_on_accelerators(name: str) -> None:
    """A new key length for every token would need a new plan, or an unaligned mask, each time."""
    for is_fixed in (True, False):
        step = extent_step(torch.device(name), is_fixed=is_fixed)
        assert step >= 256
        assert step % 8 == 0
    assert extent_step(torch.device("cpu"), is_fixed=False) == 1
    assert extent_step(torch.device("cpu"), is_fixed=True) > 1


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_out_of_memory_outside_of_pytorchs_allocator_is_recognized(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


def chained(*errors: Exception, from_each: bool = True) -> Exception:
    """Chain errors and return the last one.

    Each error has the one before as its context, and with `from_each` as its cause too.
    """
    for earlier, error in pairwise(errors):
        error.__context__ = earlier
        if from_each:
            error.__cause__ = earlier
    return errors[-1]


@pytest.mark.parametrize("from_each", [True, False], ids=["cause", "context"])
def test_out_of_memory_is_found_behind_other_errors(from_each: bool) -> None:
    """A capture that fails raises at its end, and our code turns that into a ValueError."""
    ran_out, end = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: operation failed")
    error = chained(ran_out, end, ValueError("this model can't be recorded"), from_each=from_each)
    assert is_out_of_memory(error)
    assert find_out_of_memory(error) is ran_out
    assert not is_out_of_memory(chained(RuntimeError("shapes"), ValueError("can't be recorded"), from_each=from_each))
    long = chained(torch.OutOfMemoryError(), *map(ValueError, range(2 * MAX_CHAINED_ERRORS)), from_each=from_each)
    assert not is_out_of_memory(long), "the search ends"


def test_an_error_raised_from_none_is_not_out_of_memory() -> None:
    error = chained(torch.OutOfMemoryError("CUDA out of memory"), ValueError("a wrong option"), from_each=False)
    error.__suppress_context__ = True  # as `raise ... from None` does
    assert not is_out_of_memory(error)


def test_errors_for_users_are_those_of_this_package_and_of_memory() -> None:
    with pytest.raises(ValueError) as ours:
        load_target(TargetConfig(name_or_path="nothing here"), torch.device("cpu"))
    assert is_for_users(ours.value)
    with pytest.raises(ValueError) as theirs:
        json.loads("{")
    assert not is_for_users(theirs.value)
    assert not is_for_users(ValueError("never raised"))
    assert is_for_users(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    )
