"""The device of the tests that need a GPU."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CUDA's, or the one that OUTRIDER_TEST_DEVICE names: xpu, for example, or cpu to try the tests
    themselves.
    """
    device = torch.device(os.environ.get("OUTRIDER_TEST_DEVICE", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return device
