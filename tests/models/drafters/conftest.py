"""A model that drafts well for the tiny target."""

import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.models.llm.hf_target import HFTarget


@pytest.fixture
def twin(target) -> HFTarget:
    """Make a model that often agrees with the target: its weights, disturbed, and surer of itself."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(target.model.config).double().eval().requires_grad_(False)
    for name, weight in model.state_dict().items():
        original = target.model.state_dict()[name]
        weight.copy_(original + 0.08 * original.std() * torch.randn_like(original))
    model.lm_head.weight.mul_(8.0)
    return HFTarget(model, target.tokenizer, target.identity)
