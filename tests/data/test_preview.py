"""Preview of an example.

The trained part is marked, white space is visible, and long texts are shortened.
"""

import logging

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.data.chat import encode_conversations
from outrider.data.preview import MAX_CHARACTERS, preview
from outrider.data.types import Conversation, Example, Turn


def conversation(*texts: str) -> Conversation:
    turns = tuple(Turn(role="assistant" if index % 2 else "user", content=text) for index, text in enumerate(texts))
    return Conversation(id="a", source="test", turns=turns)


def example(tokenizer: PreTrainedTokenizerFast, *texts: str) -> Example:
    return encode_conversations([conversation(*texts)], tokenizer, 1000)[0][0]


def test_the_answer_is_marked_and_white_space_is_visible(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    shown = preview(example(tiny_tokenizer, "Hi\tyou", " one\ntwo"), tiny_tokenizer)
    assert shown == "<|user|>Hi\u2192you<|assistant|>[[\u00b7one\u21b5\ntwo<|end|>]]"
    assert preview(example(tiny_tokenizer, "a", "b"), tiny_tokenizer, coloured=True).endswith("\x1b[32mb<|end|>\x1b[0m")


def test_an_escape_of_a_text_never_reaches_the_terminal(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    assert "\x1b" not in preview(example(tiny_tokenizer, "\x1b[31mred", "b"), tiny_tokenizer)


def test_long_parts_and_many_turns_are_shortened(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    shown = preview(example(tiny_tokenizer, *["x" * 300] * 2, *["y", "z"] * 4), tiny_tokenizer)
    assert len(shown) < 4 * MAX_CHARACTERS
    assert shown.endswith("... and 4 more parts")
    shown = preview(example(tiny_tokenizer, "x" * (MAX_CHARACTERS + 22), "b"), tiny_tokenizer)
    assert "x" * (MAX_CHARACTERS + 22) in shown, "a cut would save nothing"


@pytest.mark.parametrize(("max_length", "level"), [(100, "INFO"), (30, "WARNING")])
def test_the_tokens_that_are_cut_off_are_counted(
    tiny_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture, max_length: int, level: str
) -> None:
    caplog.set_level(logging.INFO)
    conversations = [conversation("a", "b" * 50), conversation("a", "b" * 3)]
    whole = [len(example.input_ids) for example in encode_conversations(conversations, tiny_tokenizer, 1000)[0]]
    caplog.clear()
    encode_conversations(conversations, tiny_tokenizer, max_length)
    lost = sum(max(0, length - max_length) for length in whole)
    (record,) = caplog.records
    assert record.levelname == level
    assert f"{int(lost > 0)} of 2 examples are cut at data.max_length {max_length}" in record.getMessage()
    assert f"{100 * lost / sum(whole):.1f} %" in record.getMessage()
