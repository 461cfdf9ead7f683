"""The forms of records: what is read of each, what is counted as not used, and why a record is dropped."""

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from outrider.data.config import DataConfig, DataSource
from outrider.data.conversations import Conversation
from outrider.data.forms import FIRST_ANSWERS, FORMS, form_of
from outrider.data.sources import draw, load_conversations

ASKED, SAID = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "A"}
PARTS = [{"type": "text", "text": "Be"}, {"type": "text", "text": "cause."}]
CALL = {"name": "look_up", "arguments": {"word": "why"}}


def parse(source: str, record: Any) -> tuple[Conversation | str, Counter[str]]:
    notes = Counter[str]()
    return FORMS[source].parse(record, notes), notes


def messages(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


def shown(parsed: Conversation | str) -> list[tuple[str, str]]:
    assert isinstance(parsed, Conversation), parsed
    return [(turn.role, turn.content) for turn in parsed.turns]


PAIR = [("user", "Why?"), ("assistant", "Because.")]


@pytest.mark.parametrize(
    ("source", "record", "expected"),
    [
        ("messages", messages(ASKED, SAID), PAIR),
        ("sharegpt", {"conversations": [ASKED, SAID]}, PAIR),
        ("messages", messages({"from": "Human", "value": "Why?"}, {"from": "GPT", "value": "Because."}), PAIR),
        ("sharegpt", {"conversations": json.dumps([ASKED, SAID])}, PAIR),
        ("messages", messages({"role": "Developer", "content": "Be brief."}, ASKED, SAID), [("system", "Be brief."), *PAIR]),
        ("messages", messages(ASKED, SAID, system="Be brief."), [("system", "Be brief."), *PAIR]),
        ("messages", messages(SAID, ASKED, SAID), PAIR),
        ("messages", messages(ASKED, {"role": "model", "content": PARTS}), PAIR),
        ("alpaca", {"instruction": "Why?", "output": "Because.", "system": "Be brief."}, [("system", "Be brief."), *PAIR]),
        ("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3"}, [("user", "Add.\n\n1 2"), ("assistant", "3")]),
        ("alpaca", {"instruction": "Why?", "output": "Because.", "history": [["Why?", "Because."]]}, PAIR * 2),
        ("completion", {"prompt": "Why?", "completion": "Because."}, PAIR),
        ("completion", {"prompt": [ASKED], "completion": [SAID]}, PAIR),
        ("completion", {"prompt": "Why?", "response": "Because."}, PAIR),
    ],
)  # fmt: skip
def test_each_form_gives_the_same_turns(source: str, record: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    parsed, _ = parse(source, record)
    assert shown(parsed) == expected


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_a_field_is_kept(key: str) -> None:
    parsed, notes = parse("messages", messages(ASKED, {**SAID, key: "Hm."}))
    assert isinstance(parsed, Conversation)
    assert (parsed.turns[1].reasoning, notes) == ("Hm.", {})


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "call00000", "function": CALL}]},
        {"role": "assistant", "tool_calls": [{"function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}]},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "content": "", "function_call": CALL},
        {"from": "function_call", "value": json.dumps(CALL)},
    ],
)
def test_calls_have_one_form(turn: dict[str, Any]) -> None:
    result = {"role": "observation", "content": "found", "name": "look_up", "tool_call_id": "call00000"}
    parsed, notes = parse("messages", messages(ASKED, turn, result, SAID, tools=json.dumps([{"name": "look_up"}])))
    assert isinstance(parsed, Conversation), parsed
    assert list(parsed.turns[1].tool_calls) == [{"type": "function", "id": "call00000", "function": CALL}]
    assert (parsed.turns[1].content, parsed.turns[2].role, parsed.turns[2].name) == ("", "tool", "look_up")
    assert list(parsed.tools) == [{"type": "function", "function": {"name": "look_up"}}]
    assert not notes


@pytest.mark.parametrize(
    ("more", "trained"), [({"weight": 0}, False), ({"train": False}, False), ({"weight": 1}, True), ({}, True)]
)
def test_an_answer_with_weight_zero_is_read_and_not_trained(more: dict[str, Any], trained: bool) -> None:
    parsed, notes = parse("messages", messages(ASKED, {**SAID, **more}, ASKED, SAID))
    assert isinstance(parsed, Conversation)
    assert [turn.trained for turn in parsed.turns] == [True, trained, True, True]
    assert not notes


@pytest.mark.parametrize(
    ("source", "record", "note"),
    [
        ("messages", messages(ASKED, SAID, score=3), "'score': not used"),
        ("messages", messages({**ASKED, "name": "Ann"}, SAID), "'name' of user turns: not used"),
        ("messages", messages(SAID, ASKED, SAID), FIRST_ANSWERS),
        ("messages", messages(ASKED, {**SAID, "weight": 0.5}), "weights of turns other than 0 and 1: taken as 1"),
        ("messages", messages(SYSTEM, ASKED, SAID, system="B"), "a system prompt beside another one in the turns: not used"),
        ("alpaca", {"instruction": "Why?", "output": "Because.", "text": "Why? Because."}, "'text': not used"),
        ("tokens", {"input_ids": [1, 2], "loss_mask": [0, 1], "text": "ab"}, "'text': not used"),
        ("text", {"text": "ab", "url": "http"}, "'url': not used"),
    ],
)  # fmt: skip
def test_a_key_that_is_not_used_is_counted(source: str, record: dict[str, Any], note: str) -> None:
    parsed, notes = parse(source, record)
    assert isinstance(parsed, Conversation), parsed
    assert notes == {note: 1}
    assert parse(source, {**record, "empty": None, "more": []})[1] == notes, "a key without a value is nothing"


@pytest.mark.parametrize(
    ("source", "record", "reason"),
    [
        ("messages", messages(ASKED, SAID, system=["Be brief."]), "'system' that is no text"),
        ("messages", messages(ASKED, {**SAID, "reasoning": {"text": "Hm."}}), "reasoning that is no text"),
        (
            "messages",
            messages(ASKED, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": "\ud800"}}]}),
            "surrogate",
        ),
        ("messages", messages(ASKED, {**SAID, "train": 0}), "no answer to train"),
        ("messages", messages(ASKED, {**SAID, "weight": "0"}), "no answer to train"),
        ("tokens", {"input_ids": [1, 2], "labels": [-100, 1]}, "'labels' with other tokens"),
        ("text", {"text": "Some words.\ud800"}, "text with half a surrogate pair"),
        ("messages", messages(ASKED, SAID, images=["a.png"]), "record with 'images'"),
        ("messages", messages({"role": "user", "content": [{"type": "image"}]}, SAID), "other parts than text"),
        ("messages", messages(ASKED, {**SAID, "tool_calls": [{"name": 3}]}), "tool calls that can't be read"),
        ("messages", messages(ASKED, {**SAID, "tool_calls": [{"name": "f", "arguments": "no json"}]}), "tool calls"),
        ("messages", messages(ASKED, SAID, tools="none"), "'tools' that are no list"),
        ("messages", messages(ASKED, {**SAID, "weight": 0}), "no answer to train"),
        ("messages", messages({"role": 3, "content": "x"}), "turn without a role"),
        ("alpaca", {"instruction": "Why?", "output": "Because.", "history": "none"}, "'history' that is no list"),
        ("alpaca", {"instruction": "Why?", "input": "", "output": None}, "without the texts 'instruction' and 'output'"),
        ("alpaca", {"instruction": "Why?", "output": ""}, "empty turn"),
        ("completion", {"prompt": "Why?", "completion": None}, "without 'prompt' and 'completion'"),
        ("tokens", {"input_ids": [1, 2], "loss_mask": [1]}, "of different lengths"),
        ("tokens", {"input_ids": [1, 2], "loss_mask": [1, 2]}, "other values than 0 and 1"),
        ("tokens", {"input_ids": [1, "2"], "loss_mask": [1, 1]}, "without the whole numbers"),
    ],
)
def test_a_record_whose_text_would_be_wrong_is_dropped(source: str, record: dict[str, Any], reason: str) -> None:
    parsed, notes = parse(source, record)
    assert isinstance(parsed, str)
    assert reason in parsed
    assert not notes, "it is counted once, as dropped"


@pytest.mark.parametrize(
    ("record", "note"),
    [
        (messages(ASKED, SAID, system="", system_prompt="Be brief."), None),
        (messages(ASKED, {**SAID, "reasoning_content": "", "thinking": "Hm."}), None),
        (messages({"role": "user", "content": "", "value": "Why?"}, SAID), None),
        (messages(ASKED, {**SAID, "reasoning": "Hm.", "thinking": "So."}), "'thinking' beside 'reasoning': not used"),
        (messages({**ASKED, "reasoning": "Hm."}, SAID), "'reasoning' of user turns: not used"),
        (messages({**ASKED, "weight": 0}, SAID), None),
        (messages(ASKED, {**SAID, "tool_calls": "null", "function_call": {}}), None),
    ],
)
def test_of_two_keys_the_filled_one_counts(record: dict[str, Any], note: str | None) -> None:
    parsed, notes = parse("messages", record)
    assert shown(parsed)[-2:] == PAIR
    assert notes == ({} if note is None else {note: 1})
    assert isinstance(parsed, Conversation)
    beside = [turn.reasoning or turn.content for turn in parsed.turns if turn.role == "system" or turn.reasoning]
    assert beside in ([], ["Be brief."], ["Hm."])


def test_nulls_that_arrow_adds_are_no_values(tmp_path: Path) -> None:
    calls = [[{"name": "f", "arguments": {"a": 1}}], [{"name": "g", "arguments": {"b": "x"}}]]
    records = [messages(ASKED, {"role": "assistant", "content": "", "tool_calls": call}) for call in calls]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    conversations, _ = load_conversations(DataConfig(source="messages", path=str(tmp_path / "a.parquet")))
    found = [conversation.turns[1].tool_calls[0]["function"] for conversation in conversations]
    assert found == [call[0] for call in calls]


def test_a_mask_may_be_labels() -> None:
    parsed, _ = parse("tokens", {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]})
    assert isinstance(parsed, Conversation)
    assert parsed.tokens is not None
    assert [list(column) for column in parsed.tokens] == [[5, 6, 7], [0, 1, 1]]


def mutated(value: Any, random: Random) -> Any:
    """Return a JSON value with one part replaced, removed or nested."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        key = random.choice([*value])
        return (
            {**value, key: mutated(value[key], random)}
            if random.random() < 0.8
            else {k: v for k, v in value.items() if k != key}
        )
    if isinstance(value, list) and value and random.random() < 0.8:
        index = random.randrange(len(value))
        return [*value[:index], mutated(value[index], random), *value[index + 1 :]]
    return random.choice([None, 0, -1, 1.5, True, "", "text", "\ud800", [], [[]], {}, {"a": {}}, [value], {"role": value}])


def test_any_record_is_a_conversation_or_a_reason() -> None:
    """And the form of the records is found by the parsers that a run uses."""
    random = Random(0)
    for name, form in FORMS.items():
        text = form.example.replace("TEXT or turns", "TEXT").replace("TEXT", '"some words"')
        record = json.loads(text)
        assert form_of([{"meta": 1}, record]) == name
        assert isinstance(parse(name, record)[0], Conversation)
        for _ in range(400):
            changed = record
            for _ in range(random.randint(1, 3)):
                changed = mutated(changed, random)
            parsed, _ = parse(name, changed)
            assert isinstance(parsed, Conversation | str)


def write(path: Path, count: int, word: str) -> str:
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps(messages({**ASKED, "content": f"{word} {index}?"}, SAID)) for index in range(count)]
    path.write_text("\n".join(lines))
    return str(path)


def test_spellings_of_calls_results_and_tools_that_say_nothing_more(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
    nothing, rows = ({"role": "tool", "content": content} for content in (None, [{"a": 1}]))
    record = {**messages(ASKED, call, nothing, call, rows, SAID), "tools": ['{"name": "f", "parameters": {}}']}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    ((conversation,), dropped) = load_conversations(DataConfig(source="messages", path=str(tmp_path / "a.jsonl")))
    assert not dropped
    assert [turn.content for turn in conversation.turns[2::2]] == ["", '[{"a": 1}]']
    assert conversation.turns[1].tool_calls[0]["function"] == {"name": "f", "arguments": {}}
    assert conversation.tools[0]["function"]["name"] == "f"
    # A key `data` of a record isn't the records of a file.
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "q", "completion": "a", "data": [{"k": 1}]}))
    ((conversation,), _) = load_conversations(DataConfig(source="completion", path=str(tmp_path / "b.jsonl")))
    assert [turn.content for turn in conversation.turns] == ["q", "a"]


def test_folders_patterns_and_several_sources_are_read_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (1, 2):
        write(tmp_path / "chats" / f"{number}.jsonl", 3, f"file {number}")
    for path in (str(tmp_path / "chats"), str(tmp_path / "chats" / "*.jsonl")):
        conversations, _ = load_conversations(DataConfig(source="messages", path=path))
        assert [conversation.turns[0].content for conversation in conversations[2:4]] == ["file 1 2?", "file 2 0?"]
        assert conversations[0].id == "chats:0"
    (tmp_path / "one.json").write_text(json.dumps({"data": [messages(ASKED, SAID)] * 2}, indent=1))
    other = DataSource(source="messages", path=str(tmp_path / "one.json"))
    several = DataConfig(sources=[DataSource(source="messages", path=str(tmp_path / "chats")), other])
    conversations, _ = load_conversations(several)
    assert len(conversations) == 8
    assert len({conversation.id for conversation in conversations}) == 8
    (tmp_path / "chats" / "README.md").write_text("# Chats")
    (tmp_path / "chats" / "3.NDJSON").write_text(json.dumps(messages(ASKED, SAID)))
    caplog.clear()
    conversations, _ = load_conversations(DataConfig(source="messages", path=str(tmp_path / "chats")))
    assert len(conversations) == 7
    assert "left out, since they are no files of records: README.md" in caplog.text
    (tmp_path / "chats" / "0.jsonl").touch()
    assert len(load_conversations(DataConfig(source="messages", path=str(tmp_path / "chats")))[0]) == 7
    assert f"files without a record: {tmp_path / 'chats' / '0.jsonl'}" in caplog.text
    with pytest.raises(ValueError, match=r"has texts, and records such as 0\.jsonl; give one of them by a pattern"):
        load_conversations(DataConfig(source="text", path=str(tmp_path / "chats")))
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "blank").mkdir(exist_ok=True)
        (tmp_path / "blank" / name).touch()
    with pytest.raises(ValueError, match="holds no record"):
        load_conversations(DataConfig(source="messages", path=str(tmp_path / "blank")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no file of records"):
        load_conversations(DataConfig(source="messages", path=str(tmp_path / "empty")))


@pytest.mark.parametrize(
    ("weights", "limit", "expected"),
    [
        ((None, None), None, (100, 40)),
        ((None, None), 70, None),
        ((1.0, 1.0), None, (40, 40)),
        ((3.0, 1.0), None, (100, 33)),
        ((3.0, 1.0), 40, (30, 10)),
        ((1.0, 1.0), 1, (1, 0)),
        ((5.0, 1.0), 10, (8, 2)),
    ],
)
def test_a_mixture_has_its_proportions_and_repeats_nothing(weights, limit, expected):
    sources = [DataSource(source="messages", path="a", weight=weight) for weight in weights]
    drawn = draw(DataConfig(sources=sources, limit=limit), [100, 40])
    assert tuple(map(len, drawn)) == expected or (expected is None and sum(map(len, drawn)) == limit)
    assert all(0 <= index < count for indexes, count in zip(drawn, (100, 40), strict=True) for index in indexes)
    assert drawn == draw(DataConfig(sources=sources, limit=limit), [100, 40])
    if limit is not None:
        assert drawn != draw(DataConfig(sources=sources, limit=limit, seed=1), [100, 40])


def test_a_mixture_without_one_of_its_sources_is_an_error() -> None:
    sources = [DataSource(source="messages", path=path, weight=1.0) for path in ("a", "b")]
    with pytest.raises(ValueError, match=r"data.sources: b has no usable conversation"):
        draw(DataConfig(sources=sources), [100, 0])
