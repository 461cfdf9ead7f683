"""Decoding of batches: independent rows that finish at different steps.

A finished row leaves the batch, and a step needs one host read for all rows together.
"""

from dataclasses import replace

import pytest
import torch

from outrider.models.decoding import (
    Finish,
    GreedyAcceptance,
    Prompts,
    RowSeeds,
    Sampling,
    SpeculativeSampling,
    generate,
)
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.drafters.oracle import OracleDrafter

from ...host_reads import HostReads, ScalarReads, decide_at_once

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47], [70, 71]]
NUM_NEW = 24


def vectors(prompts: list[list[int]] = PROMPTS) -> list[torch.Tensor]:
    return [torch.tensor(prompt) for prompt in prompts]


def answers(target, drafter, prompts, rule=None, **options) -> tuple[list[list[int]], list[Finish], list]:
    options.setdefault("max_new_tokens", NUM_NEW)
    steps = list(generate(target, drafter, rule or GreedyAcceptance(), prompts, **options))
    tokens: list[list[int]] = [[] for _ in prompts]
    finishes: dict[int, Finish] = {}
    for step in steps:
        assert all(row not in finishes for row in step.rows), "a finished row is still in the batch"
        for row, new, finish in zip(step.rows, step.tokens, step.finishes, strict=True):
            tokens[row] += new
            if finish:
                finishes[row] = finish
    return tokens, [finishes[row] for row in range(len(prompts))], steps


@pytest.fixture
def redrafter(target):
    torch.manual_seed(0)
    return build_drafter(
        parse_drafter({"kind": "redrafter", "beam_width": 3, "beam_length": 3, "head_init": "random"}), target
    ).double()


def test_stop_strings_need_a_tokenizer_and_some_text(target):
    with pytest.raises(ValueError, match="give the tokenizer too"):
        answers(target, NullDrafter(), vectors(), stop_strings=["x"])
    with pytest.raises(ValueError, match="give a list of texts"):
        answers(target, NullDrafter(), vectors(), stop_strings="END", tokenizer=target.tokenizer)
    with pytest.raises(ValueError, match="one of the stop_strings is empty"):
        answers(target, NullDrafter(), vectors(), stop_strings=[""], tokenizer=target.tokenizer)


# --- rows that sample


def test_a_wrong_number_of_seeds_is_an_error(target):
    with pytest.raises(ValueError, match="3 seeds for 4 rows"):
        answers(target, NullDrafter(), vectors(), SpeculativeSampling(sampling=Sampling()), generator=RowSeeds([1, 2, 3]))


# --- the ends of answers, inside accepted paths

RIGHT = [3, 1, 0, 2]
"""Number of right draft tokens of the oracle in each row."""


@pytest.fixture
def plain(target) -> list[list[int]]:
    return [answers(target, NullDrafter(), vectors([prompt]))[0][0] for prompt in PROMPTS]


def assert_accepted_counts(steps, right: list[int] = RIGHT) -> None:
    """Check the accepted tokens of every step but a row's last.

    The last step may reach past the end of the text that the oracle knows.
    """
    num_checked = 0
    for step in steps[1:]:
        for row, finish, num_accepted in zip(step.rows, step.finishes, step.num_accepted, strict=True):
            if finish is None:
                assert num_accepted == right[row]
                num_checked += 1
    assert num_checked


def cut_rows(steps) -> set[int]:
    """Return the rows whose answers ended inside an accepted path."""
    ends = ((step.rows, step.tokens, step.num_accepted) for step in steps)
    return {row for step in ends for row, new, num_accepted in zip(*step, strict=True) if len(new) <= num_accepted}


@pytest.mark.parametrize("limit", [1, 4, 11])
def test_the_token_limit_cuts_accepted_paths_of_a_batch(target, plain, limit):
    actual, finishes, steps = answers(target, OracleDrafter(plain, RIGHT, target.vocab_size), vectors(), max_new_tokens=limit)
    assert actual == [tokens[:limit] for tokens in plain]
    assert finishes == [Finish.LENGTH] * 4
    # Row r has 1 token after the prefill, and RIGHT[r] + 1 more after each step.
    assert cut_rows(steps) == {row for row, right in enumerate(RIGHT) if (limit - 1) % (right + 1)}


@pytest.mark.parametrize("has_fixed_shapes", [False, True])
def test_accepted_drafts_keep_their_sources_when_rows_leave_and_when_a_row_is_repeated(
    target, plain, monkeypatch, has_fixed_shapes
):
    """Origins lie on the host by row of the tree, so a step of other rows would show other sources."""

    class OracleOfSources(OracleDrafter):
        """Oracle whose nodes name the row and the node as their sources."""

        def propose(self, state, last_token, *, generator=None):
            tree, drafted = super().propose(state, last_token, generator=generator)
            origins = tuple(tuple(1 << row | 16 << node for node in range(tree.num_nodes)) for row in state[:, 0].tolist())
            return replace(tree, origins=origins), drafted

    monkeypatch.setattr(type(target), "has_fixed_shapes", has_fixed_shapes)
    right_path = (1, 3, 5)  # nodes of the oracle's tree
    limits = [5, 20, 5, 24]
    drafter = OracleOfSources(plain, RIGHT, target.vocab_size)
    actual, _, steps = answers(target, drafter, vectors(), max_new_tokens=limits)
    assert actual == [tokens[:limit] for tokens, limit in zip(plain, limits, strict=True)]
    assert steps[0].origins is None
    num_read = 0
    for step in steps[1:]:
        assert step.origins is not None
        for row, num_accepted, origins in zip(step.rows, step.num_accepted, step.origins, strict=True):
            assert origins == tuple(1 << row | 16 << node for node in right_path[:num_accepted])
            num_read += num_accepted
    assert len({step.rows for step in steps}) == 4
    assert num_read == sum(num_accepted for step in steps for num_accepted in step.num_accepted) > 20


def test_the_context_window_cuts_accepted_paths_of_a_batch(target, plain, monkeypatch):
    monkeypatch.setattr(target.model.config, "max_position_embeddings", 12)
    actual, finishes, steps = answers(target, OracleDrafter(plain, RIGHT, target.vocab_size), vectors())
    assert actual == [tokens[: 12 - len(prompt)] for tokens, prompt in zip(plain, PROMPTS, strict=True)]
    assert finishes == [Finish.CONTEXT] * 4
    assert_accepted_counts(steps)
    assert cut_rows(steps) == {0, 1}  # of 7, 10, 4 and 10 tokens in paths of 4, 2, 1 and 3


def test_stop_tokens_cut_accepted_paths_of_a_batch(target, plain):
    num_cut = 0
    for row, index in ((0, 2), (0, 3), (0, 4), (1, 5), (3, 8), (3, 9)):
        stop = plain[row][index]
        expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in plain]
        actual, finishes, steps = answers(target, OracleDrafter(plain, RIGHT, target.vocab_size), vectors(), stop_ids={stop})
        assert actual == expected
        assert finishes == [Finish.STOP_TOKEN if stop in tokens else Finish.LENGTH for tokens in plain]
        assert_accepted_counts(steps)
        stopped = {row for row, finish in enumerate(finishes) if finish == Finish.STOP_TOKEN}
        num_cut += len(cut_rows(steps) & stopped)
    assert num_cut >= 3


def test_stop_strings_cut_accepted_paths_of_a_batch(target, plain):
    tokenizer, num_cut = target.tokenizer, 0
    for row, index in ((0, 2), (0, 7), (1, 5), (3, 8), (3, 9)):
        string = tokenizer.decode(plain[row])[index : index + 2]
        expected = [
            next((tokens[:end] for end in range(len(tokens)) if string in tokenizer.decode(tokens[:end])), tokens)
            for tokens in plain
        ]
        actual, finishes, steps = answers(
            target,
            OracleDrafter(plain, RIGHT, target.vocab_size),
            vectors(),
            stop_strings=[string],
            tokenizer=tokenizer,
        )
        assert actual == expected
        stopped = {row for row, finish in enumerate(finishes) if finish == Finish.STOP_STRING}
        assert row in stopped
        assert_accepted_counts(steps)
        num_cut += len(cut_rows(steps) & stopped)
    assert num_cut >= 3


def test_a_stop_string_ends_with_the_last_byte_of_its_last_character(target):
    """Characters of two tokens, the second in the middle of an accepted path."""
    tokenizer, right = target.tokenizer, 3
    prompts = [[first, 70] for first in range(4, target.vocab_size // 2)]
    texts, _, _ = answers(target, NullDrafter(), vectors(prompts))
    num_cut = 0
    for prompt, tokens in zip(prompts, texts, strict=True):
        for end in range(2, len(tokens)):
            character = tokenizer.decode(tokens[end - 2 : end])
            if (
                len(character) > 1
                or character.isascii()
                or character in tokenizer.decode(tokens[: end - 1])
                or character == "\ufffd"
            ):
                continue
            drafter = OracleDrafter([tokens], [right], target.vocab_size)
            actual, finishes, steps = answers(target, drafter, vectors([prompt]), stop_strings=[character], tokenizer=tokenizer)
            assert actual == [tokens[:end]]
            assert finishes == [Finish.STOP_STRING]
            num_cut += len(cut_rows(steps))
            assert all(step.num_accepted == (right,) for step in steps[1:-1])
    assert num_cut >= 3


def test_wrong_prompt_lengths_are_an_error():
    with pytest.raises(ValueError, match="2 lengths for 1 prompts"):
        Prompts(input_ids=torch.ones(1, 3, dtype=torch.long), lengths=(3, 3))
    with pytest.raises(ValueError, match="padded to the longest"):
        Prompts(input_ids=torch.ones(2, 3, dtype=torch.long), lengths=(2, 2))


# --- host reads


@pytest.mark.parametrize(("batch", "tree_nodes", "temperature"), [(1, None, 1.0), (8, None, 0.0), (8, 5, 1.0)])
def test_a_step_has_one_host_read_for_any_batch_size(target, redrafter, monkeypatch, batch, tree_nodes, temperature):
    decide_at_once(monkeypatch)
    redrafter.config.tree_nodes = tree_nodes
    rule = SpeculativeSampling(sampling=Sampling(temperature=temperature)) if temperature else GreedyAcceptance()
    prompts = vectors((PROMPTS * 2)[:batch])
    steps = generate(target, redrafter, rule, prompts, max_new_tokens=NUM_NEW)
    next(steps)
    next(steps)  # the rows are of different lengths by now
    num_steps = 0
    for _ in range(5):
        with HostReads() as reads, ScalarReads() as scalars:
            next(steps)
        # On a CPU the paper's tree has only the nodes that its beams need. Reading their number is
        # one more host read; on other devices the tree has its full size.
        allowed = ["tolist"] if tree_nodes else ["__int__", "tolist"]
        assert [name for name in reads.names if name != "item"] == allowed
        assert scalars.count <= len(allowed) - 1
        num_steps += 1
    assert num_steps == 5
