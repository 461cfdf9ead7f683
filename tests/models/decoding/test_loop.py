"""The decode loop: for any drafts, it gives and stops as plain greedy decoding does."""

from collections.abc import Iterator

import pytest
import torch

from outrider.models.decoding import DraftTree, Finish, GreedyAcceptance, Sampling, SpeculativeSampling, Step, generate
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.llm.hf_target import HFTarget

from ...decoded import texts_of

MAX_NEW_TOKENS = 40


class ScriptedDrafter:
    """Drafter from a known text: right on one branch up to a depth, wrong on the others."""

    def __init__(self, text: list[int], *, right: int, depth: int, decoys: int, vocab_size: int) -> None:
        self.text, self.right, self.depth, self.decoys, self.vocab_size = text, right, depth, decoys, vocab_size
        self.max_nodes = depth * (decoys + 1)
        self.feature_layers = ()

    def init_state(self, prompts, prefill, *, max_new_tokens) -> int:
        return 1

    def select(self, state, rows) -> int:
        return state

    def propose(self, state, last_token, *, generator=None) -> tuple[DraftTree, int]:
        tokens, parents, at = [], [], -1
        for depth in range(self.depth):
            position = state + depth
            token = self.text[position] if position < len(self.text) else 0
            wrong = [(token + 1 + decoy) % self.vocab_size for decoy in range(self.decoys)]
            row = [*wrong, token if depth < self.right else (token + 9) % self.vocab_size]
            parents += [at] * len(row)
            tokens += row
            at = len(tokens) - 1
        tree = DraftTree(tokens=torch.tensor([tokens]), parents=torch.tensor([parents]), max_depth=self.depth)
        return tree, state

    def meanwhile(self, drafted) -> None:
        return None

    def advance(self, drafted, tree, accepted, output) -> int:
        return drafted + accepted.num_accepted.host[0] + 1


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


@pytest.mark.parametrize(("right", "decoys"), [(0, 0), (0, 2), (3, 2), (4, 0)])
def test_output_is_plain_decodings_for_good_and_bad_drafts(target, prompt, plain, right, decoys):
    drafter = ScriptedDrafter(plain, right=right, depth=4, decoys=decoys, vocab_size=target.vocab_size)
    steps = decode(target, drafter, prompt)
    assert tokens_of(steps) == plain
    assert all(step.num_accepted == (right,) for step in steps[1:-2]), "the drafts were as good as they were meant to be"
    assert all(step.num_nodes == 4 * (decoys + 1) for step in steps[1:])


def test_the_last_token_of_the_context_window_is_reached_with_a_tree_beyond_it(target, prompt, monkeypatch):
    monkeypatch.setattr(target.model.config, "max_position_embeddings", prompt.shape[1] + 10)
    plain = tokens_of(decode(target, NullDrafter(), prompt, max_new_tokens=10))
    drafter = ScriptedDrafter(plain, right=4, depth=4, decoys=1, vocab_size=target.vocab_size)
    assert tokens_of(decode(target, drafter, prompt, max_new_tokens=10)) == plain
    for one_drafter in (drafter, NullDrafter()):  # a longer answer ends where the window is full
        steps = decode(target, one_drafter, prompt, max_new_tokens=20)
        assert tokens_of(steps) == plain
        assert steps[-1].finishes == (Finish.CONTEXT,)


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


@pytest.mark.parametrize("rule", [GreedyAcceptance(), SpeculativeSampling(sampling=Sampling())])
def test_logits_that_are_not_numbers_end_the_answer_with_an_error(target, prompt, rule):
    steps = generate(target, NullDrafter(), rule, prompt, max_new_tokens=9)
    next(steps)
    for buffer in target._cache._buffers:
        buffer.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits are not numbers"):
        list(steps)


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

    class Busy(ScriptedDrafter):
        def meanwhile(self, drafted):
            return lambda seconds: calls.append((drafted, seconds)) or False

    verify = HFTarget.verify

    def waiting_verify(self, last_token, tree, *, meanwhile=None):
        meanwhile(0.5)
        return verify(self, last_token, tree)

    monkeypatch.setattr(HFTarget, "verify", waiting_verify)
    drafter = Busy(plain, right=3, depth=4, decoys=0, vocab_size=target.vocab_size)
    assert tokens_of(decode(target, drafter, prompt)) == plain
    assert calls == [(position, 0.5) for position in range(1, MAX_NEW_TOKENS, 4)]


def test_a_target_in_memory_never_calls_meanwhile(target, prompt, plain):
    class Refusing(ScriptedDrafter):
        def meanwhile(self, drafted):
            return lambda seconds: pytest.fail("the target doesn't wait")

    drafter = Refusing(plain, right=2, depth=4, decoys=0, vocab_size=target.vocab_size)
    assert tokens_of(decode(target, drafter, prompt)) == plain
