"""The device of these tests."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CUDA. OUTRIDER_TEST_DEVICE=cpu runs the bodies of the tests where there is none."""
    device = torch.device(os.environ.get("OUTRIDER_TEST_DEVICE", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return device
