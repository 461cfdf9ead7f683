"""Logits that aren't numbers: an error where a token is chosen from them, and nothing elsewhere."""

from math import inf, nan
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.decoding import (
    DraftTree,
    Finish,
    GreedyAcceptance,
    RowSeeds,
    Sampling,
    SpeculativeSampling,
    Step,
    TargetOutput,
    TypicalAcceptance,
    generate,
)
from outrider.models.drafters import NullDrafter
from outrider.models.llm.hf_target import HFTarget

from ...tiny_models import IDENTITY

VOCAB, PAD, HOLE = 40, 0, 39
PROMPTS = [torch.tensor([5, 6, 7, 8, 9, 10, 11]), torch.tensor([12, 3]), torch.tensor([4, 20, 21, 22])]
NUM_NEW = 12
GREEDY, SAMPLED = GreedyAcceptance(), SpeculativeSampling(sampling=Sampling(temperature=1.0))
TYPICAL = TypicalAcceptance(sampling=Sampling(temperature=1.0))
RULES = [GREEDY, SAMPLED, TYPICAL]


class HoleTarget(HFTarget):
    """A target whose logits after HOLE aren't numbers.

    It never answers with HOLE, except at row 0's `hole_position`, where the logits of some tokens
    are `scores`.
    """

    hole_position = -1
    scores: dict[int, float] = {HOLE: 1e6}  # noqa: RUF012 - tests replace it

    def _forward(self, model: Any, tokens: torch.Tensor, **arguments: Any) -> TargetOutput:
        output = super()._forward(model, tokens, **arguments)
        output.logits[..., HOLE] = torch.where(output.logits[..., HOLE].isnan(), nan, -inf)
        if "logits_to_keep" not in arguments:
            output.logits[tokens == HOLE] = nan
            rows, entries = (arguments["position_ids"] == self.hole_position).nonzero().T
            for token, score in self.scores.items():
                output.logits[rows, entries, token] = score
        return output


def hole_target() -> HoleTarget:
    options = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**options, vocab_size=VOCAB, initializer_range=0.3, max_position_embeddings=64))
    model = model.double().eval().requires_grad_(False)
    target = HoleTarget(model, None, IDENTITY)
    target._trees.require_trees()  # no probe: it compares with logits that the model itself computes
    return target


class HoleDrafter:
    """Drafter that knows the answers, and drafts HOLE beside every right token."""

    feature_layers = ()

    def __init__(self, answers: list[list[int]], *, depth: int = 3) -> None:
        self.answers, self.depth = answers, depth
        self.max_nodes = 2 * depth

    def init_state(self, prompts: Any, prefill: TargetOutput, *, max_new_tokens: int) -> list[tuple[int, int]]:
        return [(row, 1) for row in range(len(prompts.lengths))]

    def select(self, state: list[tuple[int, int]], rows: Any) -> list[tuple[int, int]]:
        return [state[row] for row in rows]

    def propose(self, state: list[tuple[int, int]], last_token: torch.Tensor, *, generator: Any = None) -> Any:
        texts = [[*self.answers[row][start:], *[PAD] * self.depth] for row, start in state]
        tokens = [[token for right in text[: self.depth] for token in (HOLE, right)] for text in texts]
        parents = [above for depth in range(self.depth) for above in [2 * depth - 1] * 2]
        parents = torch.tensor([parents] * len(state))
        return DraftTree(tokens=torch.tensor(tokens), parents=parents, max_depth=self.depth), state

    def meanwhile(self, drafted: Any) -> None:
        return None

    def advance(self, drafted: list[tuple[int, int]], tree: DraftTree, accepted: Any, output: TargetOutput) -> Any:
        assert output.logits.shape[1] == 1 + tree.num_nodes == output.hidden_states.shape[1]
        counts = accepted.num_accepted.host
        return [(row, start + count + 1) for (row, start), count in zip(drafted, counts, strict=True)]


def decode(target: HFTarget, drafter: Any, rule: Any, **options: Any) -> tuple[list[list[int]], list[Step], str]:
    """Decode until the end or an error; return the answers, the steps and the error's message."""
    answers: list[list[int]] = [[] for _ in PROMPTS]
    steps = []
    options = {"max_new_tokens": NUM_NEW, "generator": RowSeeds(range(len(PROMPTS))), **options}
    try:
        for step in generate(target, drafter, rule, PROMPTS, **options):
            steps.append(step)
            for row, tokens in zip(step.rows, step.tokens, strict=True):
                answers[row] += tokens
    except ValueError as error:
        return answers, steps, str(error)
    return answers, steps, ""


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "typical"])
def test_a_nan_of_a_draft_off_the_accepted_path_changes_nothing(rule):
    target = hole_target()
    plain, _, _ = decode(target, NullDrafter(), rule)
    answers, steps, error = decode(target, HoleDrafter(plain), rule)
    assert error == ""
    assert [len(answer) for answer in answers] == [NUM_NEW] * 3
    assert not any(HOLE in answer for answer in answers)
    if rule is not TYPICAL:
        assert answers == plain
        assert sum(sum(step.num_accepted) for step in steps) > 9


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_token_that_is_chosen_from_a_nan_is_an_error(depth):
    """The path goes on behind the hole: the first of equal NaN is token 0, which is drafted there."""
    target = hole_target()
    limits = {"max_new_tokens": [NUM_NEW, 3, 3]}
    target.hole_position = len(PROMPTS[0]) + 5
    plain, _, plain_error = decode(target, NullDrafter(), GREEDY, **limits)
    assert [len(answer) for answer in plain] == [7, 3, 3]
    assert plain[0][-1] == HOLE
    assert plain_error == (
        "the target's logits are not numbers (NaN) at token 8 of the answer in row 0 of the batch: its weights are damaged, or "
        "its type overflows; load it in another target.dtype"
    )
    if depth:
        answers, _, error = decode(target, HoleDrafter(plain, depth=depth), GREEDY, **limits)
        assert error == plain_error
        assert answers[0] == plain[0][: len(answers[0])], "the steps before stay valid"
        assert len(answers[0]) >= 7 - depth
    # An answer that plain decoding ends with the hole needs no logits behind it.
    answers, steps, error = decode(target, NullDrafter(), GREEDY, stop_ids=[HOLE], **limits)
    assert (answers, error) == (plain, "")
    assert steps[-1].finishes == (Finish.STOP_TOKEN,)


def test_a_nan_that_spreads_from_a_hidden_draft_is_an_error_and_the_next_batch_is_right():
    target = hole_target()
    plain, _, _ = decode(target, NullDrafter(), GREEDY)
    target.model.model.embed_tokens.weight[HOLE] = nan
    answers, _, error = decode(target, HoleDrafter(plain), GREEDY)
    assert [len(answer) for answer in answers] == [1] * 3
    assert "not numbers (NaN) at token 2 of the answer in row 0" in error
    assert decode(target, NullDrafter(), GREEDY)[::2] == (plain, "")


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "typical"])
@pytest.mark.parametrize(
    ("scores", "words"), [({3: inf}, "infinite"), (dict.fromkeys(range(VOCAB), -inf), "all minus infinity"), ({3: nan}, "NaN")]
)
def test_infinite_logits_are_an_error_and_not_token_zero(rule, drafts, scores, words):
    target = hole_target()
    plain, _, _ = decode(target, NullDrafter(), rule)
    target.scores, target.hole_position = scores, len(PROMPTS[0]) + 3
    drafter = HoleDrafter(plain) if drafts else NullDrafter()
    answers, _, error = decode(target, drafter, rule, max_new_tokens=[NUM_NEW, 3, 3])
    assert answers[0] == plain[0][: len(answers[0])]
    assert len(answers[0]) == 4 or drafts
    assert "token 5 of the answer in row 0" in error
    assert words in error
    assert "target.dtype" in error
