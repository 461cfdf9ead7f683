"""Decontamination: training data have no evaluation prompts, and all else is kept."""

import json
from collections import Counter
from pathlib import Path

import pytest

from outrider.data.config import DataConfig
from outrider.data.decontamination import PromptOverlap, without_overlap
from outrider.data.sources import load_conversations
from outrider.data.suites import Prompt, PromptSet, load_suite
from outrider.data.types import Conversation, Turn


def suite(*turns: str, name: str = "exam") -> PromptSet:
    prompts = tuple(Prompt(id=str(index), category="any", turns=(turn,)) for index, turn in enumerate(turns))
    return PromptSet(name=name, revision="0", prompts=prompts)


def conversation(*questions: str, system: str | None = None) -> Conversation:
    turns = [Turn(role="system", content=system)] if system else []
    for question in questions:
        turns += [Turn(role="user", content=question), Turn(role="assistant", content="one two three four five")]
    return Conversation(id=questions[0], source="test", turns=tuple(turns))


EXAM = suite("Tell me: how many legs, in all, have two spiders?", "Who are you?")


@pytest.mark.parametrize(
    ("questions", "suite_name"),
    [
        # case and punctuation don't matter
        (("tell me how many legs in all have two spiders",), "exam"),
        (("Please answer. How many legs, in ALL... have an ant?",), "exam"),  # five words in a row
        (("how many legs in total have two spiders",), None),  # four at most
        (("Hello", "Say it again: how many legs in all?"), "exam"),  # a later turn
        (("who are you",), "exam"),  # shorter than five words: only an equal prompt counts
        (("who are you to say so, and why?",), None),
        (("",), None),
        (("请问:两只蜘蛛一共有几条腿?",), "exam"),  # a character of a script without spaces is a word
        (("两只猫有几条腿",), None),
        (("one two three four five",), None),  # answers don't count
    ],
)
def test_five_words_in_a_row_are_found(questions: tuple[str, ...], suite_name: str | None) -> None:
    exam = suite(*(turn for prompt in EXAM.prompts for turn in prompt.turns), "one two three four six", "两只蜘蛛一共有几条腿")
    assert PromptOverlap([exam], 5).suite_of(conversation(*questions)) == suite_name


def test_a_system_prompt_counts() -> None:
    hidden = conversation("Answer it", system="how many legs in all have two spiders")
    assert PromptOverlap([EXAM], 5).suite_of(hidden) == "exam"


def test_dropped_conversations_are_counted_by_suite() -> None:
    dropped: Counter[str] = Counter()
    overlap = PromptOverlap([EXAM, suite("the quick brown fox jumps", name="typing")], 5)
    kept = without_overlap(
        [conversation("Who are you?"), conversation("a b c d e"), conversation("The quick brown fox jumps!")], overlap, dropped
    )
    assert [conversation.id for conversation in kept] == ["a b c d e"]
    assert dropped == {
        "prompt that exam asks too (5 words in a row)": 1,
        "prompt that typing asks too (5 words in a row)": 1,
    }


def test_decontamination_changes_no_other_sampled_conversation(tmp_path: Path) -> None:
    records = [[{"role": "user", "content": f"question number {i}"}, {"role": "assistant", "content": "a"}] for i in range(40)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": record}) + "\n" for record in records))
    config = DataConfig(source="messages", path=str(path), limit=20)
    drawn, _ = load_conversations(config)
    question = drawn[3].turns[0].content
    kept, dropped = load_conversations(config, PromptOverlap([suite(question)], 13))
    assert kept == [conversation for conversation in drawn if conversation != drawn[3]]
    assert dropped.total() == 1
    with pytest.raises(ValueError, match=r"every prompt.*overlaps with the evaluation.*eval\.suites"):
        load_conversations(config, PromptOverlap([suite(*(conversation.turns[0].content for conversation in drawn))], 13))


@pytest.mark.slow
def test_answers_to_the_evaluations_prompts_are_no_training_data(shared_data: Path) -> None:
    chat = str(shared_data / "chat" / "alpaca_eval_outputs.jsonl.gz")
    suites = {
        name: load_suite(name, str(shared_data / name / file))
        for name, file in (("alpaca_eval", "alpaca_eval.jsonl"), ("mt_bench", "question.jsonl"))
    }
    config = DataConfig(source="sharegpt", path=chat, limit=2000)
    with pytest.raises(ValueError, match="every prompt"):
        load_conversations(config, PromptOverlap([suites["alpaca_eval"]], 13))
    kept, dropped = load_conversations(config, PromptOverlap([suites["mt_bench"]], 13))
    assert 1900 < len(kept) < 2000
    assert len(kept) + dropped.total() == 2000
