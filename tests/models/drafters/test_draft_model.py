"""A draft model drafts exactly its own greedy text, whatever was accepted before, and changes nothing."""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.hf_target import HFTarget

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]


@pytest.fixture
def small(target) -> HFTarget:
    """Another model, whose weights are partly the target's, so that its drafts are sometimes right."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**target.model.config.to_dict(), "num_hidden_layers": 1})).double().eval()
    model.load_state_dict(target.model.state_dict(), strict=False)
    return HFTarget(model, target.tokenizer, target.identity)


class Recording(DraftModel):
    """Checks every draft against the greedy text of full forwards."""

    texts: list[list[int]]
    num_checked = 0

    def propose(self, state, last_token, *, generator=None):
        tree = super().propose(state, last_token, generator=generator)
        for drafted, last, before in zip(tree.tokens.tolist(), last_token.tolist(), state.tolist(), strict=True):
            text = next(text for text in self.texts if text[-2:] == [before, last])
            for token in drafted:
                assert token == int(self.model.model(torch.tensor([text])).logits[0, -1].argmax())
                text = [*text, token]
                self.num_checked += 1
        return tree


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_are_the_models_own_greedy_text_and_the_output_the_targets(target, small, length, batch):
    prompts = [torch.tensor(prompt) for prompt in PROMPTS[:batch]]
    plain: list[list[int]] = [[] for _ in prompts]
    for step in generate(target, NullDrafter(), GreedyAcceptance(), prompts, max_new_tokens=20):
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            plain[row] += tokens
    drafter = Recording(small, length=length)
    drafter.texts = [list(prompt) for prompt in PROMPTS[:batch]]
    found: list[list[int]] = [[] for _ in prompts]
    accepted = set()
    for step in generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=20):
        accepted |= set(step.num_accepted)
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            found[row] += tokens
            drafter.texts[row] += tokens
    assert found == plain
    assert drafter.num_checked >= length * 3


def test_a_model_that_drafts_for_itself_is_always_right(target):
    twin = HFTarget(target.model, target.tokenizer, target.identity)
    steps = list(
        generate(target, DraftModel(twin, length=3), GreedyAcceptance(), torch.tensor([PROMPTS[0]]), max_new_tokens=21)
    )
    assert [step.num_accepted for step in steps[1:]] == [(3,)] * 5


def test_the_cache_grows_with_a_long_answer(target, monkeypatch):
    monkeypatch.setattr("outrider.models.drafters.draft_model.EXPECTED_NEW_TOKENS", 2)
    twin = HFTarget(target.model, target.tokenizer, target.identity)
    prompt = torch.tensor([PROMPTS[0]])
    steps = list(generate(target, DraftModel(twin, length=2), GreedyAcceptance(), prompt, max_new_tokens=40))
    assert all(step.num_accepted == (2,) for step in steps[1:])


def test_another_tokenizer_and_no_length_are_refused(target, small):
    with pytest.raises(ValueError, match="length is 0"):
        DraftModel(small, length=0)
    DraftModel(small, length=2).require_vocabulary(target)
    stranger = HFTarget(small.model, small.tokenizer, replace(small.identity, tokenizer_sha256="other"))
    with pytest.raises(ValueError, match="has another tokenizer"):
        DraftModel(stranger, length=2).require_vocabulary(target)


@pytest.mark.parametrize("length", [1, 3, 6, 8])
def test_drafts_may_reach_beyond_a_table_of_positions(target, length):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    config.bos_token_id = config.eos_token_id = None
    model = GPT2LMHeadModel(config).double().eval()
    big, twin = (HFTarget(model, target.tokenizer, target.identity) for _ in range(2))
    prompt = torch.tensor([[5, 6, 7, 8]])
    answers = []
    for drafter in (NullDrafter(), DraftModel(twin, length=length)):
        steps = generate(big, drafter, GreedyAcceptance(), prompt, max_new_tokens=99)
        answers.append([token for step in steps for token in step.tokens[0]])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 28
