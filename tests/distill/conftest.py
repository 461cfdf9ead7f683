"""A tiny target of each test's own."""

from pathlib import Path

import pytest

from outrider.models.config import TargetConfig
from outrider.models.hf_target import HFTarget
from outrider.models.target import load_target


@pytest.fixture
def target(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu"))
