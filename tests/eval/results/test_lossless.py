"""Lossless checks: every wrong token is reported, and the audit accepts only numeric noise."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.eval.measure.audit import audit, audits, read_again
from outrider.eval.results.lossless import find_mismatches, is_exact
from outrider.models.decoding import GreedyAcceptance, RowSeeds, Sampling, SpeculativeSampling, TargetOutput, generate
from outrider.models.drafters import NullDrafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ..conftest import MakeRecord

PROMPT = torch.tensor([[5, 6, 7, 8]])


def greedy(target: HFTarget, max_new_tokens: int, prompt: torch.Tensor = PROMPT) -> list[int]:
    steps = generate(target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=max_new_tokens)
    return [token for step in steps for token in step.tokens[0]]


def sampled(target: HFTarget, temperature: float, seed: int) -> list[int]:
    rule = SpeculativeSampling(sampling=Sampling(temperature=temperature))
    options: dict[str, Any] = {"max_new_tokens": 32, "stop_ids": target.stop_ids, "generator": RowSeeds([seed])}
    steps = generate(target, NullDrafter(), rule, PROMPT, **options)
    return [token for step in steps for token in step.tokens[0]]


def test_the_first_differing_token_is_found_also_where_one_answer_is_longer(make_record: MakeRecord) -> None:
    plain = make_record(token_ids=[4, 5, 6])
    same = make_record(method="same", token_ids=[4, 5, 6])
    other = make_record(method="other", token_ids=[4, 7, 6])
    longer = make_record(method="longer", token_ids=[4, 5, 6, 7], accepted_histogram=[3], num_verify_tokens=3)
    mismatches = find_mismatches([plain, same, other, longer])
    assert [(mismatch.record.method, mismatch.position) for mismatch in mismatches] == [("other", 1), ("longer", 3)]


def test_a_baseline_that_disagrees_with_itself_is_found(make_record: MakeRecord) -> None:
    mismatches = find_mismatches([make_record(token_ids=[4, 5, 6]), make_record(token_ids=[4, 5, 7], repeat=1)])
    assert [mismatch.position for mismatch in mismatches] == [2]


def test_answers_to_different_prompts_are_never_compared(make_record: MakeRecord) -> None:
    with pytest.raises(ValueError, match="no baseline record of the same prompt"):
        find_mismatches([make_record(), make_record(method="d", prompt_sha256="ff")])
    with pytest.raises(ValueError, match="no baseline record of the same prompt"):
        find_mismatches([make_record(method="d")])


def test_only_greedy_full_precision_requires_equal_tokens() -> None:
    assert [is_exact(dtype) for dtype in ("float32", "torch.float64", "torch.bfloat16")] == [True, True, False]
    assert not any(is_exact(dtype, temperature=0.7) for dtype in ("float32", "float64", "bfloat16"))
    assert not is_exact("float32", batch_size=2)


def test_answers_are_compared_within_their_temperature(make_record: MakeRecord) -> None:
    records = [
        make_record(token_ids=[4, 5, 6]),
        make_record(token_ids=[7, 8, 9], temperature=0.7),
        make_record(token_ids=[7, 8, 9], temperature=0.7, method="same"),
        make_record(token_ids=[4, 5, 6], temperature=0.7, method="the greedy answer"),
    ]
    assert [mismatch.record.method for mismatch in find_mismatches(records)] == ["the greedy answer"]
    with pytest.raises(ValueError, match="no baseline record of the same prompt"):
        find_mismatches([make_record(), make_record(method="d", temperature=0.7)])


def test_the_audit_passes_greedy_answers_and_fails_wrong_ones(tiny_target: HFTarget) -> None:
    tokens = greedy(tiny_target, 12)
    right = audit(tiny_target, PROMPT, tokens, max_new_tokens=12)
    assert right.deficit == 0.0
    assert right.noise < 1e-3
    assert right.within_noise
    for at in (0, 5, 11):
        assert not audit(tiny_target, PROMPT, [*tokens[:at], 11, *tokens[at + 1 :]], max_new_tokens=12).within_noise
    assert audit(tiny_target, PROMPT, tokens[:1], max_new_tokens=1).within_noise


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_to_a_prompt_are_audited_together_as_alone(tiny_target: HFTarget, temperature: float) -> None:
    rule = SpeculativeSampling(sampling=Sampling(temperature=temperature)) if temperature else GreedyAcceptance()
    steps = generate(tiny_target, NullDrafter(), rule, PROMPT, max_new_tokens=24, generator=RowSeeds([3]))
    long = [token for step in steps for token in step.tokens[0]]
    answers = [long, long[:5], [*long[:7], 11, *long[8:]], [11]]
    options: dict[str, Any] = {"max_new_tokens": len(long), "temperature": temperature, "seed": 3}
    together = audits(tiny_target, PROMPT, answers, **options)
    assert [one.within_noise for one in together] == [True, False, False, False], "the second ends before the limit"
    for one, answer in zip(together, answers, strict=True):
        alone = audit(tiny_target, PROMPT, answer, **options)
        assert (one.ends_rightly, one.within_noise) == (alone.ends_rightly, alone.within_noise)
        assert (one.deficit > 1e-3) == (alone.deficit > 1e-3)


@pytest.mark.parametrize("lengths", [{64 + 3}, set(range(100))], ids=["once", "always"])
def test_loud_noise_is_explained_by_another_pass(
    tiny_target: HFTarget, monkeypatch: pytest.MonkeyPatch, lengths: set[int]
) -> None:
    """A pass of the bare model that is off at a position proves nothing, if others agree with what decoding had.

    Its noise explains no wrong token there.
    """
    tokens = greedy(tiny_target, 64)
    plain_logits = HFTarget.plain_logits

    def wrong(target: HFTarget, text: torch.Tensor, num_last: int) -> torch.Tensor:
        logits = plain_logits(target, text, num_last).clone()
        place = 33 - (text.shape[1] - num_last)  # of the 31st token's logits
        if text.shape[1] in lengths and place >= 0:
            logits[:, place] = logits[:, place].flip(-1)
        return logits

    monkeypatch.setattr(HFTarget, "plain_logits", wrong)
    assert audit(tiny_target, PROMPT, tokens, max_new_tokens=64).within_noise == (len(lengths) == 1)
    start = [*tokens[:30], 11]
    prompt = torch.cat([PROMPT, torch.tensor([start])], dim=1)
    answer = [*start, *greedy(tiny_target, 64 - len(start), prompt)]
    assert answer != tokens
    assert not audit(tiny_target, PROMPT, answer, max_new_tokens=64).within_noise


def test_a_pass_of_no_numbers_is_a_verdict_and_not_an_error(tiny_target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare pass that overflows in float16 proves nothing; JSON has no NaN."""
    tokens = greedy(tiny_target, 8)
    plain_logits = HFTarget.plain_logits
    for bad in (torch.nan, torch.inf):
        monkeypatch.setattr(HFTarget, "plain_logits", lambda *args, bad=bad: plain_logits(*args).fill_(bad))
        found = audit(tiny_target, PROMPT, tokens, max_new_tokens=8)
        assert not found.within_noise
        assert json.dumps(asdict(found), allow_nan=False)


def test_noise_is_compared_with_the_spread_of_its_own_position(tiny_target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A position of wide logits elsewhere explains no noise here."""
    tokens = greedy(tiny_target, 12)
    verify, plain_logits = HFTarget.verify, HFTarget.plain_logits
    noise = torch.randn(tiny_target.vocab_size, generator=torch.Generator().manual_seed(0))

    def audited(width: float) -> bool:
        """Audit with logits `width` times as wide at all positions but the first, and noise of half the spread there."""

        def wide(target: HFTarget, *args: Any, **options: Any) -> TargetOutput:
            output = verify(target, *args, **options)
            return replace(output, logits=output.logits * width)

        def noisy(target: HFTarget, text: torch.Tensor, num_last: int) -> torch.Tensor:
            logits = plain_logits(target, text, num_last).clone()
            place = PROMPT.shape[1] - 1 - (text.shape[1] - num_last)
            logits[:, place + 1 :] *= width
            logits[:, place] += 0.5 * logits[:, place].std() * noise
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(HFTarget, "verify", wide)
            patch.setattr(HFTarget, "plain_logits", noisy)
            return audit(tiny_target, PROMPT, tokens, max_new_tokens=12).within_noise

    assert not audited(1.0)
    assert not audited(10.0)


def test_a_place_is_read_again_at_the_same_position(tiny_target: HFTarget) -> None:
    """Also where the text ends before the longest pass."""
    text = torch.tensor([[5, 6, 7, 8, 9, 10]])
    logits = tiny_target.plain_logits(text, 4)[0]
    for position in range(4):
        again = read_again(tiny_target, text, logits, position, 1e-4)
        assert again is not None
        torch.testing.assert_close(again, logits[position])
        assert read_again(tiny_target, text, logits.roll(1, 0), position, 1e-4) is None


def test_a_deficit_needs_noise_at_its_own_position(tiny_target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise elsewhere explains no wrong token, and noise there explains a near tie."""
    tokens = greedy(tiny_target, 40)
    text = torch.cat([PROMPT, torch.tensor([tokens[:-1]])], dim=1)
    logits = tiny_target.plain_logits(text, len(tokens))[0]
    (best, second), places = logits.topk(2).values.T, logits.topk(2).indices
    at = int((best - second).argmin())
    prompt = torch.cat([PROMPT, torch.tensor([[*tokens[:at], int(places[at, 1])]])], dim=1)
    answer = [*prompt[0, PROMPT.shape[1] :].tolist(), *greedy(tiny_target, 40 - at - 1, prompt)]
    plain_logits = HFTarget.plain_logits

    def audited(noisy: int) -> bool:
        def with_noise(target: HFTarget, *args: Any) -> torch.Tensor:
            logits = plain_logits(target, *args).clone()
            logits[:, noisy] += 0.2 * logits.std() * torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(0))
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(HFTarget, "plain_logits", with_noise)
            return audit(tiny_target, PROMPT, answer, max_new_tokens=40).within_noise

    assert audited(at)
    assert not audited(at - 1 if at else 1)


def test_an_answer_must_end_where_plain_decoding_ends(tiny_target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = sampled(tiny_target, 1.0, seed=3)
    options: dict[str, Any] = {"max_new_tokens": 32, "temperature": 1.0, "seed": 3}
    assert audit(tiny_target, PROMPT, tokens, **options).within_noise
    lost = audit(tiny_target, PROMPT, tokens[:-1], **options)
    assert (lost.deficit < 1e-6, lost.ends_rightly, lost.within_noise) == (True, False, False)
    monkeypatch.setattr(HFTarget, "stop_ids", (tokens[3],))
    first = tokens.index(tokens[3])
    assert audit(tiny_target, PROMPT, tokens[: first + 1], **options).within_noise
    behind = audit(tiny_target, PROMPT, tokens, **options)
    assert (behind.ends_rightly, behind.within_noise, behind.position) == (False, False, first + 1)


def test_the_audit_measures_noise_where_there_is_some(tiny_target_dir: Path) -> None:
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="bfloat16", device="cpu"))
    result = audit(target, PROMPT, greedy(target, 24), max_new_tokens=24)
    assert result.deficit == 0.0  # plain decoding read it token by token too
    assert 0.0 < result.noise < 0.5


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("float64", "bfloat16"))]
)
def test_the_audit_uses_the_clocks_of_a_sampled_answer(tiny_target_dir: Path, dtype: str) -> None:
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype=dtype, device="cpu"))
    for temperature in (0.5, 1.0, 2.0):
        tokens = sampled(target, temperature, seed=3)
        options: dict[str, Any] = {"max_new_tokens": 32, "temperature": temperature}
        result = audit(target, PROMPT, tokens, seed=3, **options)
        # the division by the clocks and the difference of logarithms round differently
        assert result.deficit < 1e-6
        assert result.within_noise
        assert not audit(target, PROMPT, tokens, seed=4, **options).within_noise
        assert not audit(target, PROMPT, sampled(target, 2 * temperature, 3), seed=3, **options).within_noise
        assert not audit(target, PROMPT, tokens, max_new_tokens=32).within_noise


def test_two_candidates_that_tie_within_the_noise_explain_a_sampled_token(tiny_target, monkeypatch):
    """The test moves the clock of the second candidate.

    Its score is then a millionth, or a thousandth, below the best score.
    """
    tokens = sampled(tiny_target, 1.0, seed=3)
    logits = tiny_target.model(PROMPT).logits[0, -1]
    clocks = RowSeeds([3]).clocks(logits[None], torch.tensor([0]), len(logits))[0, 0]
    best, second = (logits - clocks.log()).topk(2).indices.tolist()
    assert best == tokens[0]
    for gap, explained in ((1e-6, True), (1e-3, False)):
        tied = clocks.clone()
        tied[second] = clocks[best] * (logits[second] - logits[best] + gap).exp()
        monkeypatch.setattr(RowSeeds, "clocks", lambda self, probs, depths, tokens, tied=tied: tied[None, None])
        options: dict[str, Any] = {"max_new_tokens": 1, "temperature": 1.0, "seed": 3}
        assert audit(tiny_target, PROMPT, [best], **options).within_noise
        assert audit(tiny_target, PROMPT, [second], **options).within_noise == explained
