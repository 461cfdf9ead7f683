"""Inputs of users that once failed: what is trained of each first record, and what is dropped or noted."""

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.cli.init_facts import EQUAL_PROMPTS, read_data_facts
from outrider.data.answers import AnswerFinder
from outrider.data.chat import use_chat_template
from outrider.data.config import DataConfig
from outrider.data.examples import encode_conversations
from outrider.data.sources import load_conversations

CLAY = "Clay is made of very small grains of weathered rock.<|end|>"
WELL = "Most dug wells are between three and thirty metres deep.<|end|>"
THOUGHT = "<think>\nThe question is short, so one sentence will do.\n</think>\n\n"
SYSTEM = "<|system|>Answer like a pirate."


@pytest.fixture(scope="module")
def demo_tokenizer(demo_target_dir: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(demo_target_dir)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.mark.parametrize(
    ("source", "file", "template", "trained"),
    [
        ("messages", "reasoning_in_a_field.jsonl", "thinking.jinja", [THOUGHT + CLAY]),
        ("sharegpt", "system_prompt_in_a_column.jsonl", "any_roles.jinja", [f"Arr! {CLAY}"]),
        ("messages", "turns_with_weight_zero.jsonl", "any_roles.jinja", [CLAY]),
        ("messages", "thinking_in_half_of_the_answers.jsonl", "thinking.jinja", [f"<think>\n\n</think>\n\n{CLAY}"]),
        ("messages", "two_turns.jsonl", "conversation_ends_with_another_token.jinja", [CLAY, WELL]),
        ("sharegpt", "conversations_with_roles.jsonl", "any_roles.jinja", [CLAY]),
        ("messages", "content_in_parts.jsonl", "any_roles.jinja", [CLAY]),
        ("messages", "folder_of_jsonl", "any_roles.jinja", [CLAY]),
        ("text", "rendered_conversations.jsonl", None, [CLAY, WELL]),
        ("sharegpt", "first_turn_is_an_answer.jsonl", "any_roles.jinja", [CLAY]),
    ],
)
def test_all_records_are_trained_as_they_should_be(source, file, template, trained, shared_cases, demo_tokenizer):
    tokenizer = copy.deepcopy(demo_tokenizer)
    use_chat_template(tokenizer, template and str(shared_cases / template))
    finder = AnswerFinder(tokenizer, [3])
    data: dict[str, Any] = {"source": source, "path": str(shared_cases / file)}
    conversations, unread = load_conversations(DataConfig(**data), is_rendered=finder.is_rendered)
    examples, dropped = encode_conversations(conversations, finder, 4096)
    assert (len(examples), unread.total(), dropped.total(), finder.notes.total()) == (8, 0, 0, 0)
    first = examples[0]
    text = tokenizer.decode(first.input_ids)
    assert text.startswith(SYSTEM) == ("system" in file)
    assert tokenizer.decode(first.input_ids[first.loss_mask]).startswith("".join(trained))


def test_prompts_that_share_an_instruction_are_left_out_if_they_are_equal(shared_cases: Path) -> None:
    facts = read_data_facts(shared_cases / "forty_with_the_same_instruction.jsonl", 1000)
    assert (facts.source, facts.overlap_words, len(facts.prompts)) == ("messages", EQUAL_PROMPTS, 4)
    assert read_data_facts(shared_cases / "folder_of_jsonl", 1000).source == "messages"
    piratical = read_data_facts(shared_cases / "system_prompt_in_a_column.jsonl", 1000)
    assert [prompt["system"] for prompt in piratical.prompts] == ["Answer like a pirate."]
