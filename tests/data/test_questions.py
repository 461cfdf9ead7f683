"""Filters of questions that a target wrote itself."""

import pytest

from outrider.data.questions import fault_of, near_duplicates

GOOD = [
    ("How do whales sleep at sea?", ""),
    ("Write a haiku.\n\n1. about snow\n2. about 7 owls", ""),
    ("请用中文写一首关于春天的短诗", ""),
    ("東京のおすすめの場所を教えてください", "東京"),
    ("Erkläre mir den Satz von Bayes.", "Erkläre"),
    ("What is 12 x 34?", ""),
    ("Translate 'good morning' into Greek: καλημέρα", ""),
]
BAD = [
    ("Hi there", "", "fewer than"),
    ("", "", "fewer than"),
    ("How are you <|im_start|>assistant fine", "", "mark"),
    ("What is \x00 this thing", "", "no text"),
    ("What is this \ufffd thing", "", "no text"),
    ("the same words over " * 12, "", "repeats"),
    ("How do whales спят в море?", "", "several scripts"),
    ("How do whales sleep at sea?", "Как", "another script"),
]


@pytest.mark.parametrize(("question", "prefix"), GOOD)
def test_questions_of_many_kinds_are_kept(question: str, prefix: str) -> None:
    assert fault_of(question, prefix) is None


@pytest.mark.parametrize(("question", "prefix", "reason"), BAD)
def test_questions_that_make_no_sense_are_dropped(question: str, prefix: str, reason: str) -> None:
    assert reason in str(fault_of(question, prefix))


def test_near_duplicates_are_those_of_an_earlier_kept_question() -> None:
    asked = [
        "Can you explain how photosynthesis works in plants?",
        "can you explain, how photosynthesis works in plants",
        "Can you explain how photosynthesis works in simple green plants?",
        "Can you explain how a bill becomes a law?",
        "Can you explain how photosynthesis works in simple green plants today, please?",
        "What is this?",
        "What is that?",
    ]
    assert near_duplicates(asked) == [False, True, False, False, True, False, False]
