"""A tiny target that stops now and then, and requests of different lengths."""

import random
from pathlib import Path

import pytest
import torch

from outrider.distill.regenerate.engine import Limits, Request
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

LIMITS = Limits(max_new_tokens=24, max_tokens=60)


@pytest.fixture
def target(tiny_target_dir: Path) -> HFTarget:
    """Load a target with several stop tokens: a random model rarely generates a single one."""
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu"))
    assert target.model.generation_config is not None
    target.model.generation_config.eos_token_id = [3, *range(20, 30)]
    return target


@pytest.fixture
def limits() -> Limits:
    return LIMITS


@pytest.fixture
def requests() -> list[Request]:
    """Make eleven requests; the longest prompts leave fewer tokens for their answers."""
    rng = random.Random(0)
    lengths = [rng.randint(2, 30) for _ in range(9)] + [45, 59]
    prompts = [torch.tensor([rng.randrange(4, 300) for _ in range(length)]) for length in lengths]
    assert {LIMITS.room(length) for length in lengths} == {24, 15, 1}
    return [Request(id=f"r{index}", prompt_ids=prompt, seed=index * 7) for index, prompt in enumerate(prompts)]
