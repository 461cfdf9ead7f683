"""A target in float64, where tree attention and plain decoding agree on every arg-max."""

from pathlib import Path

import pytest
import torch

from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target


@pytest.fixture(scope="session")
def target(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float64"), torch.device("cpu"))


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.tensor([[1, 70, 71, 72, 2]])
