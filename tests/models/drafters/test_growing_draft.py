"""A draft model's growing tree: answers stay the target's, and the cache is that of a fresh read."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.small_models import DraftModelConfig
from outrider.models.target.hf_target import HFTarget

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]


@pytest.fixture
def small(target) -> HFTarget:
    """Make a model with some of the target's weights, so that its drafts are sometimes right."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**target.model.config.to_dict(), "num_hidden_layers": 1})).double().eval()
    model.load_state_dict(target.model.state_dict(), strict=False)
    return HFTarget(model, target.tokenizer, target.identity)


def decode(target, drafter, rows, num_new=24):
    answers = [[] for _ in rows]
    steps = []
    texts = [torch.tensor(prompt) for prompt in rows]
    for step in generate(target, drafter, GreedyAcceptance(), texts, max_new_tokens=num_new):
        steps.append(step)
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            answers[row] += tokens
    return answers, steps


@pytest.mark.parametrize("pace", ["confidence", "expected"])
@pytest.mark.parametrize("rows", [PROMPTS[:1], PROMPTS], ids=["1 row", "3 rows"])
def test_answers_are_those_of_plain_decoding(target, small, pace, rows):
    plain, _ = decode(target, NullDrafter(), rows)
    drafter = DraftModel(DraftModelConfig(pace=pace, tree_nodes=12), small)
    answers, _ = decode(target, drafter, rows)

    assert answers == plain
