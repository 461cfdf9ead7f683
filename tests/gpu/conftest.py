"""Device of the tests that need a GPU."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device that OUTRIDER_TEST_DEVICE names, by default CUDA's.

    It may be xpu, for example, or cpu to run these tests without an accelerator.
    """
    device = torch.device(os.environ.get("OUTRIDER_TEST_DEVICE", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return device
