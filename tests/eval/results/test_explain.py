"""Why drafts end: each miss has one cause, and the groups that are far worse than others are named."""

import pandas as pd
import pytest

from outrider.eval.records.records import Drafts, EvalRecord
from outrider.eval.results.explain import (
    FREE,
    NOT_IN_VOCABULARY,
    NOT_LEARNED,
    RANKED,
    UNCERTAIN,
    advice,
    cause_of,
    earlier_matches,
    explain,
    kind_of,
    places_of,
    where_of,
)

from ..conftest import MakeRecord


def traced(make_record: MakeRecord, ends: str, *, accepted: int = 1, probability: float = 0.9, **changes) -> EvalRecord:
    """Return a record of an answer whose steps accept equally many tokens; no token stands twice."""
    num_tokens = 1 + len(ends) * (accepted + 1)
    return make_record(
        **{
            "method": "eagle",
            "label": "EAGLE",
            "accepted_histogram": [0] * accepted + [len(ends)],
            "drafts": Drafts(
                prompt_ids=[100, 101],
                accepted=[accepted] * len(ends),
                ends=ends,
                probabilities=[probability] * len(ends),
                texts=[" word"] * num_tokens,
            ),
            **changes,
        }
    )


def test_every_miss_has_one_cause_and_other_steps_have_none(make_record):
    (explanation,) = explain([traced(make_record, "mmmrrv-f.")], {})
    assert {cause.name: cause.count for cause in explanation.causes} == {NOT_LEARNED: 3, RANKED: 2, NOT_IN_VOCABULARY: 1}
    assert explanation.num_misses == 6
    assert explanation.tokens_per_step == 2.0
    assert explanation.causes[0].most == 18 / 6
    assert [step.split(":")[0] for step in advice(explanation)] == [
        "train longer, or on more texts like these",
        "verify larger trees",
        "train with a larger drafter.draft_vocab_size, or on texts like these",
    ]
    assert explanation.positions().to_dict("records") == [
        {"draft token": 1, "reached": 8, "right": 1.0},
        {"draft token": 2, "reached": 6, "right": 0.0},
    ]


@pytest.mark.parametrize(
    ("end", "probability", "is_free", "cause"),
    [
        ("m", 0.49, True, UNCERTAIN),
        ("m", 0.5, True, FREE),
        ("r", 0.9, True, FREE),
        ("r", 0.9, False, RANKED),
        ("v", 0.9, False, NOT_IN_VOCABULARY),
        ("m", 0.9, False, NOT_LEARNED),
        *((end, 0.1, True, None) for end in ".-f"),
    ],
)
def test_the_first_cause_that_holds_counts(end, probability, is_free, cause):
    assert cause_of(end, probability, is_free=is_free) == cause


def test_a_language_that_was_left_out_is_named(make_record):
    known = [traced(make_record, "mf" * 10 + "fffff", category="German", prompt_id=str(index)) for index in range(4)]
    unknown = [traced(make_record, "m" * 25, accepted=0, category="Hindi", prompt_id=f"h{index}") for index in range(4)]
    (explanation,) = explain([*known, *unknown], {})
    assert (explanation.causes[0].name, explanation.causes[0].where) == (NOT_LEARNED, "category Hindi")
    assert "(category Hindi)" in advice(explanation)[0]
    assert explanation.groups("category").iloc[0]["category"] == "Hindi"
    (alone,) = explain(known, {})
    assert alone.causes[0].where is None


def test_the_script_of_an_answer_tells_a_language_where_no_category_does(make_record):
    def drafts(text: str, ends: str) -> Drafts:
        zeros, texts = [0] * len(ends), [text] * (1 + len(ends))
        return Drafts(prompt_ids=[1], accepted=zeros, ends=ends, probabilities=[0.9] * len(ends), texts=texts)

    answers = [(" word", "mffff" * 6), (" \u0441\u043b\u043e\u0432\u043e", "m" * 30), ("1", "f" * 30)]
    records = [
        traced(make_record, ends, accepted=0, drafts=drafts(text, ends), category="chat", prompt_id=text)
        for text, ends in answers
    ]
    (explanation,) = explain(records, {})
    assert explanation.causes[0].where == "script cyrillic"
    assert set(explanation.groups("script")["script"]) == {"latin", "cyrillic", "no letters"}


def test_a_drafter_that_falls_short_of_its_training_is_said(make_record):
    def doubt(accepted: int, estimate: float | None, template: str | None = None) -> str:
        facts = {"tokens_per_step_estimate": estimate, "chat_template": template}
        records = [traced(make_record, "m" * 20, accepted=accepted)]
        return explain(records, {"EAGLE": None if estimate is None else facts}, "here")[0].doubt or ""

    assert doubt(0, None) == doubt(1, 2.5) == doubt(1, 2.5, "here") == ""
    assert "was 2.50; that is lost here" in doubt(0, 2.5)
    assert "was 4.00. Either it has learned those by heart" in doubt(1, 4.0)
    assert "another chat template" in doubt(1, 2.5, "there")


def test_methods_are_explained_alone_and_records_without_drafts_are_left_out(make_record):
    records = [traced(make_record, "mm"), traced(make_record, "rr", method="medusa", label="Medusa"), make_record()]
    assert [(one.label, one.causes[0].name) for one in explain(records, {})] == [("EAGLE", NOT_LEARNED), ("Medusa", RANKED)]
    assert explain([make_record()], {}) == []


def test_temperatures_and_batch_sizes_are_explained_apart(make_record):
    greedy, sampled = traced(make_record, "mm"), traced(make_record, "rr", temperature=0.7, batch_size=2)
    explanations = explain([greedy, sampled], {"EAGLE": {"tokens_per_step_estimate": 9.0}})
    assert [(one.label, one.causes[0].name) for one in explanations] == [
        ("EAGLE", NOT_LEARNED),
        ("EAGLE, temperature 0.7, batches of 2", RANKED),
    ]
    assert all(one.estimate == 9.0 for one in explanations)


def test_tokens_copied_from_the_prompt_are_told_apart(make_record):
    drafts = Drafts(prompt_ids=[7, 8, 9], accepted=[0, 0], ends="mm", probabilities=[0.9, 0.9], texts=["a", "b", "c"])
    record = traced(make_record, "mm", accepted=0, token_ids=[7, 8, 9], drafts=drafts)
    assert explain([record], {})[0].steps[["copied", "cause"]].values.tolist() == [
        ["no", NOT_LEARNED],
        ["from the prompt", FREE],
    ]


def test_a_token_stood_earlier_after_the_same_tokens():
    assert earlier_matches([1, 2, 3, 9, 1, 2, 3]) == [None, None, None, None, None, None, 2]
    assert earlier_matches([1, 2, 3, 1, 2, 4]) == [None] * 6
    # The longest match counts, and of equal ones the last.
    assert earlier_matches([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2, 7])[-1] == 3


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((" Word", "first of a word"), ("ing", "letters"), (" 12", "digits"), ("\n\n", "space"), (" (", "punctuation")),
        *(("\ufffd", "part of a character"), ("", "space"), (" नमस्ते", "first of a word")),
    ],
)
def test_kinds_of_tokens(text, kind):
    assert kind_of(text) == kind


def test_places_in_an_answer():
    texts = ["<think>", "so", "</think>", "Here", ":\n``", "`", "x = 1", "```", " done"]
    assert list(places_of(texts)) == [
        *("thinking", "thinking", "answer", "answer", "answer", "code", "code", "answer", "answer"),
    ]


def test_a_small_group_in_which_nearly_all_misses_are_is_named_before_a_large_one_with_some(make_record):
    """Short texts hold all the Chinese ones, so they have more of the misses, too."""
    groups = [("chinese", 100, 300, 70), ("law", 100, 900, 90), ("law", 2000, 300, 10)]  # category, context, steps, misses
    steps = pd.DataFrame(
        {
            "cause": NOT_IN_VOCABULARY if number < misses else None,
            "category": category,
            "context": context,
            **dict.fromkeys(("token", "copied", "place", "suite", "script"), "x"),
        }
        for category, context, count, misses in groups
        for number in range(count)
    )
    assert where_of(steps, NOT_IN_VOCABULARY) == "category chinese"


def test_steps_that_a_method_has_taken_are_not_advised(make_record):
    """Drafters without training learn nothing, and what is merged isn't merged again."""
    free = traced(make_record, "mm", method="suffix+recycling tree_nodes=40", label="Suffix + Recycling")
    assert [step.split(":")[0] for step in advice(explain([free], {})[0])] == [
        "train a drafter on texts like these, and merge it with this one"
    ]
    again = [1, 2, 3, 4, 5, 1, 2, 3, 4]
    for method, merge in (("redrafter", True), ("redrafter+suffix", False)):
        record = traced(make_record, "mmmm", method=method, label=method, token_ids=again)
        (explanation,) = explain([record], {})
        assert any(cause.name == FREE for cause in explanation.causes)
        assert any("merge free sources" in step for step in advice(explanation)) == merge
