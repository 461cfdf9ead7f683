"""The decode loop: for any drafts, it gives and stops as plain greedy decoding does."""

from collections.abc import Iterator

import pytest
import torch

from outrider.models.decoding import Finish, GreedyAcceptance, Step, generate
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.drafters.oracle import OracleDrafter
from outrider.models.llm.hf_target import HFTarget

from ...decoded import texts_of

MAX_NEW_TOKENS = 40


def decode(target: HFTarget, drafter, prompt: torch.Tensor, **options) -> list[Step]:
    options.setdefault("max_new_tokens", MAX_NEW_TOKENS)
    return list(generate(target, drafter, GreedyAcceptance(), prompt, **options))


def tokens_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens[0]]


@pytest.fixture
def plain(target: HFTarget, prompt: torch.Tensor) -> list[int]:
    """Decode greedily by full forward passes: no cache, no mask, no code of ours."""
    text = prompt
    with torch.no_grad():
        for _ in range(MAX_NEW_TOKENS):
            text = torch.cat([text, target.model(text).logits[:, -1:].argmax(-1)], dim=1)
    return text[0, prompt.shape[1] :].tolist()


def test_plain_decoding_equals_full_forwards(target, prompt, plain):
    steps = decode(target, NullDrafter(), prompt)
    assert tokens_of(steps) == plain
    assert [len(step.tokens[0]) for step in steps] == [1] * MAX_NEW_TOKENS


def test_a_prompt_that_fills_the_context_window_is_refused(target, prompt, monkeypatch):
    monkeypatch.setattr(target.model.config, "max_position_embeddings", prompt.shape[1])
    with pytest.raises(ValueError, match="no room for an answer in the target's context window of 5 tokens"):
        decode(target, NullDrafter(), prompt)


def test_phases_are_timed_only_on_request(target, prompt):
    assert all(step.seconds is None for step in decode(target, NullDrafter(), prompt, max_new_tokens=3))
    steps = decode(target, NullDrafter(), prompt, max_new_tokens=3, timed=True)
    assert [step.seconds is None for step in steps] == [True, False, False]
    assert all(step.seconds.verify > 0 for step in steps[1:])


def test_steps_stream_as_they_are_decoded(target, prompt):
    steps = generate(target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=5)
    assert isinstance(steps, Iterator)
    assert next(steps).is_prefill


@pytest.mark.parametrize("bad", [torch.zeros(1, 0, dtype=torch.long), [torch.tensor([3, 4]), torch.tensor([]).long()]])
def test_an_empty_prompt_is_refused(target, bad):
    with pytest.raises(ValueError, match="prompts of at least one token"):
        decode(target, NullDrafter(), bad)


def test_token_ids_that_the_target_does_not_have_are_refused(target):
    for bad in (target.vocab_size, -1):
        with pytest.raises(ValueError, match="is it another tokenizer's?"):
            decode(target, NullDrafter(), torch.tensor([[1, bad]]))


def test_an_empty_batch_is_refused(target):
    with pytest.raises(ValueError, match="there is no prompt to decode"):
        decode(target, NullDrafter(), [])


def test_no_new_tokens_is_refused(target, prompt):
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        decode(target, NullDrafter(), prompt, max_new_tokens=0)


def test_two_interleaved_generate_calls_of_one_target_are_an_error(target, prompt):
    first = generate(target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=5)
    next(first)
    second = generate(target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=5)
    next(second)
    with pytest.raises(RuntimeError, match="finish one `generate` before the next"):
        next(first)
    assert len(list(second)) == 4


def test_a_target_as_its_own_draft_model_is_an_error(target, prompt):
    with pytest.raises(RuntimeError, match="load a draft model as a separate target"):
        decode(target, DraftModel(DraftModelConfig(length=2), target), prompt)


def test_each_row_has_a_limit_of_its_own(target, prompt, plain):
    prompts = [prompt[0], prompt[0], prompt[0]]
    steps = decode(target, NullDrafter(), prompts, max_new_tokens=[3, 7, 1])
    assert texts_of(steps, 3) == [plain[:3], plain[:7], plain[:1]]
    finishes = [finish for step in steps for finish in step.finishes if finish]
    assert finishes == [Finish.LENGTH] * 3
    with pytest.raises(ValueError, match="2 limits of new tokens for 3 prompts"):
        decode(target, NullDrafter(), prompts, max_new_tokens=[3, 7])


def test_the_pass_gets_what_the_drafter_does_meanwhile(target, prompt, plain, monkeypatch):
    """It belongs to the drafts that are being verified, not to those of another step."""
    calls = []

    class Busy(OracleDrafter):
        def meanwhile(self, drafted):
            return lambda seconds: calls.append((int(drafted[0, 1]), seconds)) or False

    verify = HFTarget.verify

    def waiting_verify(self, last_token, tree, *, meanwhile=None):
        meanwhile(0.5)
        return verify(self, last_token, tree)

    monkeypatch.setattr(HFTarget, "verify", waiting_verify)
    drafter = Busy([plain], [3], target.vocab_size)
    assert tokens_of(decode(target, drafter, prompt)) == plain
    assert calls == [(position, 0.5) for position in range(1, MAX_NEW_TOKENS, 4)]


def test_a_target_in_memory_never_calls_meanwhile(target, prompt, plain):
    class Refusing(OracleDrafter):
        def meanwhile(self, drafted):
            return lambda seconds: pytest.fail("the target doesn't wait")

    drafter = Refusing([plain], [2], target.vocab_size)
    assert tokens_of(decode(target, drafter, prompt)) == plain
