"""Prompt lookup against a naive search, and against transformers' candidates."""

import itertools
import random

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import load_drafter
from outrider.models.drafters.prompt_lookup import PRIOR, PromptLookup, PromptLookupConfig


def drafted(drafter: PromptLookup, text: list[int]) -> list[int]:
    """Return the draft tokens after a text."""
    store = drafter.new_store()
    for start in range(0, len(text) - 1, 3):
        store.add(text[start : min(start + 3, len(text) - 1)])
    found = drafter.candidates_of(store, text[-1:])
    assert list(found.parents) == list(range(-1, len(found.tokens) - 1))
    assert len(found.tokens) == len(found.scores) == len(found.bins) <= drafter.config.tree_nodes
    assert all(0 < score < 1 for score in found.scores)
    assert all(0 <= number < len(PRIOR) * len(PRIOR[0]) for number in found.bins)
    return list(found.tokens)


def naive(text: list[int], max_ngram: int, length: int) -> list[int]:
    """Search all places for the longest match, the latest first."""
    for n in range(min(max_ngram, len(text)), 0, -1):
        ending = text[-n:]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == ending:
                return list(itertools.islice(itertools.cycle(text[start + n :]), length))
    return []


@pytest.mark.parametrize("seed", range(20))
def test_the_draft_is_that_of_a_naive_search(seed):
    chance = random.Random(seed)
    max_ngram, length, vocab = chance.randint(1, 5), chance.randint(1, 12), chance.choice([2, 5, 30])
    drafter = PromptLookup(PromptLookupConfig(tree_nodes=length, max_ngram=max_ngram))
    num_found = 0
    for size in range(1, 60):
        text = [chance.randrange(vocab) for _ in range(size)]
        expected = naive(text, max_ngram, length)
        assert drafted(drafter, text) == expected
        num_found += bool(expected)
    assert num_found > 10


def test_a_text_that_repeats_itself_is_drafted_at_full_length():
    drafter = PromptLookup(PromptLookupConfig(tree_nodes=7))
    assert drafted(drafter, [5, 1, 2, 3, 1, 2]) == [3, 1, 2, 3, 1, 2, 3]
    assert drafted(drafter, [9, 9]) == [9] * 7


def test_a_text_without_a_match_has_an_empty_draft():
    drafter = PromptLookup(PromptLookupConfig())
    assert drafted(drafter, [1]) == drafted(drafter, [1, 2, 3]) == []


@pytest.mark.parametrize("seed", range(10))
def test_it_finds_a_draft_wherever_transformers_finds_one(seed):
    chance = random.Random(seed)
    drafter = PromptLookup(PromptLookupConfig())
    theirs = PromptLookupCandidateGenerator(num_output_tokens=10, max_matching_ngram_size=2, max_length=100)
    num_found = 0
    for size in range(2, 60):
        text = [chance.randrange(12) for _ in range(size)]
        found = theirs.get_candidates(torch.tensor([text]))[0][0, size:].tolist()
        assert len(drafted(drafter, text)) >= len(found)
        num_found += bool(found)
    assert num_found > 20


@torch.inference_mode()
def test_rows_of_a_batch_copy_from_their_own_texts(target):
    drafter = load_drafter("prompt_lookup", target, tree_nodes=4)
    prompts = [torch.tensor(tokens) for tokens in ([1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47])]

    def accepted(rows: list[int]) -> dict[int, list[int]]:
        counts: dict[int, list[int]] = {row: [] for row in rows}
        for step in generate(target, drafter, GreedyAcceptance(), [prompts[row] for row in rows], max_new_tokens=40):
            for place, count in zip(step.rows, step.num_accepted, strict=True):
                counts[rows[place]].append(count)
        return counts

    together = accepted([0, 1, 2])
    assert any(map(any, together.values()))
    assert all(accepted([row])[row] == together[row] for row in range(3))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("prompt_lookup", {"tree_nodes": 0}, "prompt_lookup.tree_nodes=0: must be above 0"),
        ("prompt_lookup", {"max_ngram": 65}, "prompt_lookup.max_ngram=65: must be at most 64"),
        ("prompt_lookup", {"max_ngram": "3"}, 'prompt_lookup.max_ngram="3": must be a whole number'),
        ("prompt_lookup", {"nodes": 5}, "the drafter prompt_lookup has no option nodes"),
        ("suffix", {"depth": 0}, "suffix.depth=0: must be above 0"),
        ("suffix", {"max_ngram": 3}, "the drafter suffix has no option max_ngram"),
        ("recycling", {"depth": 0}, "recycling.depth=0: must be above 0"),
        ("recycling", {"top_k": 301}, "recycling.top_k=301: the target has only 300 tokens"),
        ("recycling", {"max_ngram": 3}, "the drafter recycling has no option max_ngram"),
    ],
)
def test_wrong_options_of_training_free_drafters_are_errors(target, name, options, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(name, target, **options)
