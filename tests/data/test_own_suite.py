"""Suites that are drawn from conversations."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.data.config import DataConfig
from outrider.data.conversations import Conversation, Role, Turn
from outrider.data.questions import draw_suite
from outrider.data.sources import PromptOverlap, load_conversations
from outrider.data.suites import load_suite

from ..commands import invoke

WORDS = ["apple", "river", "stone", "cloud", "window", "garden", "silver", "paper", "music", "forest", "candle", "bridge"]


def chat(*turns: tuple[Role, str], tools: Sequence[dict[str, str]] = ()) -> Conversation:
    return Conversation(id="x", tools=tools, turns=tuple(Turn(role=role, content=text) for role, text in turns))


def test_a_prompt_has_the_system_message_the_tools_and_the_users_turns():
    tools = [{"name": "send"}]
    whole = chat(("system", "Be short."), ("user", "One?"), ("assistant", "1"), ("user", "And two, please?"), tools=tools)
    records, num_repeated = draw_suite([whole], 5, seed=0)
    expected = {"id": 0, "category": "tools", "system": "Be short.", "tools": tools, "turns": ["One?", "And two, please?"]}
    assert (records, num_repeated) == ([expected], 0)


@pytest.mark.parametrize(
    "turns",
    [
        [("assistant", "Hello.")],
        [("user", "a"), ("user", "b")],
        [("user", "a"), ("assistant", ""), ("tool", "3"), ("assistant", "b")],
        [("user", " ")],
        [("system", "a")],
    ],
)
def test_others_are_no_prompts(turns):
    assert draw_suite([chat(*turns)], 5, seed=0) == ([], 0)


def test_prompts_that_nearly_repeat_each_other_are_drawn_once():
    texts = [f"Where is my order {number}, which I paid for a week ago, and why isn't it here?" for number in range(50)]
    others = [f"Write about {' and '.join(WORDS[start : start + 4])}." for start in range(8)]
    records, num_repeated = draw_suite([chat(("user", text)) for text in [*texts, *others]], 5, seed=1)
    asked = [record["turns"][0] for record in records]
    assert sum(text in texts for text in asked) <= 1
    assert (len(records), num_repeated > 0) == (5, True)
    assert [record["id"] for record in records] == list(range(5))


def test_a_suite_is_drawn_from_a_log_and_kept_out_of_the_training(tmp_path: Path):
    log, suite = tmp_path / "log.jsonl", tmp_path / "traffic.jsonl"
    questions = [
        f"Tell {word}@example.org about the {word} of a {other}." for word in WORDS for other in WORDS[:3] if word != other
    ]
    log.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in questions))
    result = invoke(["data", "suite", str(log), "--output", str(suite), "--count", "4"])
    assert result.exit_code == 0, result.output
    assert "traffic.jsonl has 4 prompts." in result.output
    assert "@" not in suite.read_text(), "addresses are replaced"
    prompts = load_suite("traffic", str(suite))
    data = DataConfig(source="openai", path=str(log))
    kept, dropped = load_conversations(data, PromptOverlap([prompts], 13), unanswered=True)
    held = {prompt.turns[0] for prompt in prompts.prompts}
    assert len(held) == 4
    assert not held & {conversation.turns[0].content for conversation in kept}
    assert dropped.total() >= 4
    again = invoke(["data", "suite", str(log), "--output", str(suite)])
    assert again.exit_code != 0
    assert "which exists" in again.output
