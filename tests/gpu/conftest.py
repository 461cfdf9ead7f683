"""The device of the tests that need a GPU."""

import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """CUDA's, or the one that OUTRIDER_TEST_DEVICE names: on a CPU most of these tests can be tried out."""
    device = torch.device(os.environ.get("OUTRIDER_TEST_DEVICE", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return device
