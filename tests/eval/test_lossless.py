"""A wrong token is found, and only noise passes for noise."""

from pathlib import Path

import pytest
import torch

from outrider.eval.lossless import audit, find_mismatches, is_exact
from outrider.models.config import TargetConfig
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter
from outrider.models.hf_target import HFTarget
from outrider.models.target import load_target

from .conftest import MakeRecord


def test_the_first_differing_token_is_found_also_where_one_answer_is_longer(make_record: MakeRecord) -> None:
    plain = make_record(token_ids=[4, 5, 6])
    same = make_record(method="same", token_ids=[4, 5, 6])
    other = make_record(method="other", token_ids=[4, 7, 6])
    longer = make_record(method="longer", token_ids=[4, 5, 6, 7], accepted_histogram=[3], num_verify_tokens=3)
    found = find_mismatches([plain, same, other, longer])
    assert [(mismatch.record.method, mismatch.position) for mismatch in found] == [("other", 1), ("longer", 3)]


def test_a_baseline_that_disagrees_with_itself_is_found(make_record: MakeRecord) -> None:
    found = find_mismatches([make_record(token_ids=[4, 5, 6]), make_record(token_ids=[4, 5, 7], repeat=1)])
    assert [mismatch.position for mismatch in found] == [2]


def test_answers_to_different_prompts_are_never_compared(make_record: MakeRecord) -> None:
    with pytest.raises(ValueError, match="no baseline record of the same prompt"):
        find_mismatches([make_record(), make_record(method="d", prompt_sha256="ff")])
    with pytest.raises(ValueError, match="no baseline record of the same prompt"):
        find_mismatches([make_record(method="d")])


def test_only_full_precision_is_held_to_the_very_tokens() -> None:
    assert [is_exact(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)] == [True, True, False]


def test_the_audit_passes_greedy_answers_and_fails_wrong_ones(tiny_target: HFTarget) -> None:
    prompt = torch.tensor([[5, 6, 7, 8]])
    steps = generate(tiny_target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=12)
    tokens = [token for step in steps for token in step.tokens[0]]
    greedy = audit(tiny_target, prompt, tokens)
    assert greedy.deficit == 0.0
    assert greedy.noise < 1e-3
    assert greedy.within_noise
    assert not any(audit(tiny_target, prompt, [*tokens[:at], 11, *tokens[at + 1 :]]).within_noise for at in (0, 5, 11))
    assert audit(tiny_target, prompt, tokens[:1]).within_noise


def test_the_audit_measures_noise_where_there_is_some(tiny_target_dir: Path) -> None:
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="bfloat16", device="cpu"))
    prompt = torch.tensor([[5, 6, 7, 8]])
    steps = generate(target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=24)
    tokens = [token for step in steps for token in step.tokens[0]]
    result = audit(target, prompt, tokens)
    assert result.deficit == 0.0  # token by token is how plain decoding read it
    assert 0.0 < result.noise < 0.5
