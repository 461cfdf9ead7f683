"""Answers of real data in the texts of chat templates: where they begin and end, token by token."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.data.answers import STOPPED, AnswerFinder
from outrider.data.chat import ChatTemplate, use_chat_template
from outrider.data.conversations import Conversation, Turn
from outrider.data.examples import encode_conversations
from outrider.data.types import Example

from .habits import HABITS, TOOLS, Habit

SPECIAL = re.compile(r"<\|\w+\|>|<\w+_of_turn>|\[/?INST\]|\[gMASK\]")
SHARED = [
    "Yes.",
    "- one\n- two",
    "\n1. first\n2. second",
    "a",
    "t",
    "  indented",
    "ends in spaces  ",
    "ü 你好 🙂",
    "<b>bold</b>",
    "e|>",
]
REASONINGS = [None, "Short.", "First,\n\nthen second.", "a", "Is it 3 < 4? </b>"]
LOOKUP: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "description": "Find.", "parameters": {}}}


def with_habit(
    tokenizer: PreTrainedTokenizerFast, habit: Habit, **options: Any
) -> tuple[PreTrainedTokenizerFast, AnswerFinder]:
    tokenizer = copy.deepcopy(tokenizer)
    special = {*SPECIAL.findall(habit.template), *habit.ends, "<|assistant|>", "<|user|>", "<|system|>"}
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": sorted(special - {"</s>"})})
    tokenizer.chat_template = habit.template
    use_chat_template(tokenizer, None, options or ({"strftime_now": "1 May"} if "strftime_now" in habit.template else None))
    return tokenizer, AnswerFinder(tokenizer, [tokenizer.convert_tokens_to_ids(end) for end in habit.ends])


def chat(*turns: Turn, **more: Any) -> Conversation:
    return Conversation(id="c", turns=turns, **more)


def user(text: str) -> Turn:
    return Turn(role="user", content=text)


def answer(text: str, **more: Any) -> Turn:
    return Turn(role="assistant", content=text, **more)


def trained(examples: list[Example], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, str]]:
    """Yield the text of each run of trained tokens, with the text before it."""
    for example in examples:
        mask = [False, *example.loss_mask.tolist(), False]
        starts = [index for index in range(1, len(mask)) if mask[index] and not mask[index - 1]]
        for start in starts:
            end = mask.index(False, start)
            ids = example.input_ids.tolist()
            yield tokenizer.decode(ids[: start - 1]), tokenizer.decode(ids[start - 1 : end - 1])


def require(conversation: Conversation, habit: Habit, tokenizer: PreTrainedTokenizerFast, finder: AnswerFinder) -> None:
    """Check that exactly what the target writes is trained, each answer behind its own prompt."""
    examples, dropped = encode_conversations([conversation], finder, 10_000)
    assert not dropped
    answers = [index for index, turn in enumerate(conversation.turns) if turn.role == "assistant"]
    expected = []
    for index in answers:
        turn = conversation.turns[index]
        if turn.tool_calls:
            assert habit.call is not None
            reasoning = turn.reasoning
            text = habit.call(reasoning, turn.content, json.dumps(turn.tool_calls[0]["function"]))
        else:
            before, mark, after = turn.content.partition("</think>\n\n")
            reasoning = before.removeprefix("<think>\n").removesuffix("\n") if mark else turn.reasoning
            text = habit.written(reasoning, after if mark else turn.content)
        prompt = ChatTemplate(tokenizer).prompt(conversation.turns[:index], conversation.tools)
        if reasoning is None:
            prompt = prompt.removesuffix(habit.opens)  # where the block has no place
        expected += [(prompt, text)] if turn.trained else []
    found = list(trained(examples, tokenizer))
    assert [text for _, text in found] == [text for _, text in expected]
    assert [before for before, _ in found] == [before for before, _ in expected]
    ids = [example.id for example in examples]
    assert len(set(ids)) == len(ids)
    assert habit.rewrites or len(examples) == 1


def random_conversation(random: Random, habit: Habit) -> Conversation:
    system = [Turn(role="system", content="Be brief.")] if habit.has_system and random.random() < 0.3 else []
    turns = list[Turn]()
    for number in range(random.randint(1, 4)):
        turns.append(user(f"Question {number}?"))
        if habit.call is not None and random.random() < 0.3:
            arguments = {"word": random.choice(SHARED[:2]), "count": random.randint(0, 9)}
            call = {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": arguments}}
            beside = "" if habit.calls_stand_alone else random.choice(("", "Let me look."))
            thought = None if habit.calls_stand_alone else random.choice((None, "Which one?"))
            turns += [answer(beside, reasoning=thought, tool_calls=(call,)), Turn(role="tool", content="found", name="look_up")]
        text, reasoning = random.choice(SHARED), random.choice(REASONINGS)
        text = text.strip() if habit.strips else text
        if reasoning is not None and random.random() < 0.5:
            text, reasoning = f"<think>\n{reasoning}\n</think>\n\n{text.lstrip(chr(10))}", None
        elif reasoning is not None:
            text = text.lstrip("\n")
        turns.append(answer(text, reasoning=reasoning, trained=not turns[:2] or random.random() < 0.8))
    if not any(turn.trained for turn in turns if turn.role == "assistant"):
        turns[-1] = answer("Yes.")
    return chat(*system, *turns, tools=(LOOKUP,) if habit.call is not None and random.random() < 0.5 else ())


@pytest.mark.parametrize("name", HABITS)
def test_what_the_target_writes_is_trained_and_nothing_else(name: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    habit, random = HABITS[name], Random(name)
    tokenizer, finder = with_habit(tiny_tokenizer, habit)
    for _ in range(60):
        require(random_conversation(random, habit), habit, tokenizer, finder)
    assert finder.has_ends


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("forgets reasoning", "<think>", "</think>"),
        ("forgets reasoning", "<|begin|>", "<|close_block|>"),
        ("opens reasoning", "<think>", "</think>"),
    ],
)
def test_a_prompt_without_thinking_has_answers_without_reasoning(name, begin, end, tiny_tokenizer):
    template = HABITS[name].template.replace("<think>\n", f"{begin}\n").replace("\n</think>", f"\n{end}")
    habit = replace(HABITS[name], template=template)
    tokenizer, finder = with_habit(tiny_tokenizer, habit, enable_thinking=False)
    conversation = chat(
        user("Q1"), answer("A1", reasoning="Hm."), user("Q2"), answer("<think>\nHm.\n</think>\n\nA2"), user("Q3"), answer("A3")
    )
    found = list(trained(encode_conversations([conversation], finder, 1000)[0], tokenizer))
    assert [text for _, text in found] == [f"A{number}{habit.ends[0]}" for number in (1, 2, 3)]
    assert all(before.endswith(f"{begin}\n\n{end}\n\n") and "|>\n\nA" not in before for before, _ in found)
    assert finder.notes.total() == 2, "the reasoning isn't used"


@pytest.mark.parametrize(("train_on", "expected"), [("all", ["A1", "A2"]), ("last", ["A2"])])
def test_the_recipe_says_which_answers_are_trained(train_on, expected, tiny_tokenizer):
    tokenizer, finder = with_habit(tiny_tokenizer, HABITS["appends"])
    conversation = chat(user("Q1"), answer("A1"), user("Q2"), answer("A2"), user("Q3"))
    examples, _ = encode_conversations([conversation], finder, 1000, train_on=train_on)
    assert [text for _, text in trained(examples, tokenizer)] == [f"{text}<|im_end|>" for text in expected]
    unweighted = chat(user("Q1"), answer("A1"), user("Q2"), answer("A2", trained=False))
    assert [text for _, text in trained(encode_conversations([unweighted], finder, 1000, train_on="last")[0], tokenizer)] == [
        "A1<|im_end|>"
    ]
    (example,), _ = encode_conversations([conversation], finder, 1000, train_on="every token")
    assert example.loss_mask.all()
    # A template that rewrites gives a text for each answer; what both texts have is trained once.
    tokenizer, finder = with_habit(tiny_tokenizer, HABITS["forgets reasoning"])
    examples, _ = encode_conversations([conversation], finder, 1000, train_on="every token")
    texts = [text for _, text in trained(examples, tokenizer)]
    assert [("Q1" in text, "Q2" in text, "A2" in text) for text in texts] == [(True, False, False), (False, True, True)]


def test_a_text_that_the_template_has_written_is_read_as_it_is(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("appends", "ends twice", "strips"):
        tokenizer, finder = with_habit(tiny_tokenizer, HABITS[name])
        text = ChatTemplate(tokenizer).text((user("Q1"), answer("A1"), user("Q2"), answer("A2")))
        assert finder.is_rendered(text)
        assert not finder.is_rendered("Some prose about an assistant and a user.")
        examples, _ = encode_conversations([Conversation(id="c", text=text)], finder, 1000)
        assert [text for _, text in trained(examples, tokenizer)] == [HABITS[name].written(None, text) for text in ("A1", "A2")]


@pytest.mark.parametrize(
    "turn",
    [
        answer("A<|im_end|>B"),
        answer("A", reasoning="<|im_end|>"),
        answer("", tool_calls=[{"function": {"name": "<|im_end|>"}}]),
    ],
)
def test_an_answer_that_the_target_would_have_ended_earlier_is_dropped(turn, tiny_tokenizer):
    _, finder = with_habit(tiny_tokenizer, HABITS["appends"])
    examples, dropped = encode_conversations([chat(user("Q"), answer("A")), chat(user("Q"), turn)], finder, 1000)
    assert (len(examples), dropped) == (1, {STOPPED: 1})


def test_tokens_with_a_mask_are_taken_as_they_are(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    finder = AnswerFinder(tiny_tokenizer, [3])
    given = [Conversation(id=str(id), tokens=([5, id, 3], b"\0\1\1")) for id in (7, len(tiny_tokenizer))]
    examples, dropped = encode_conversations(given, finder, 1000)
    assert [(example.id, example.input_ids.tolist(), example.loss_mask.tolist()) for example in examples] == [
        ("7", [5, 7, 3], [False, True, True])
    ]
    assert dropped.total() == 1
    padding = Conversation(id="p", tokens=([], b""))  # attention sees none of its tokens
    assert encode_conversations([given[0], padding], finder, 1000)[1] == {"no token of the assistant": 1}
    turns = [Conversation(id="a", tokens=([5, 7, 3, 5, 7, 3, 5], b"\0\1\1\0\1\1\0"))]
    for train_on, expected in (("last", [4, 5]), ("every token", [*range(7)])):
        (example,), _ = encode_conversations(turns, finder, 1000, train_on=train_on)
        assert example.loss_mask.nonzero().flatten().tolist() == expected


def test_what_a_template_leaves_out_is_counted(tiny_tokenizer, caplog):
    silent = "{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}</s>{% endif %}{% endfor %}"
    habit = Habit(template=silent, ends=("<|end|>",), written=lambda reasoning, answer: answer)
    _, finder = with_habit(tiny_tokenizer, habit)
    encode_conversations([chat(Turn(role="system", content="Be brief."), user("Q"), answer("A"), tools=(LOOKUP,))], finder, 100)
    assert finder.notes == {"system turns that the chat template leaves out": 1, "'tools' that the chat template leaves out": 1}
    assert "writes none of the target's stop tokens (<|end|>)" in caplog.text
    changing = Habit(template=silent.replace("m.content", "m.content | upper"), ends=("</s>",), written=habit.written)
    _, finder = with_habit(tiny_tokenizer, changing)
    conversations = [chat(user("Q"), answer("words")), chat(user("Q"), answer("A"))]
    assert encode_conversations(conversations, finder, 100)[1].total() == 1
    assert "'user: Q | assistant: words'" in caplog.text, "one example is shown"


def test_calls_that_a_template_leaves_out_or_splits_are_dropped(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {}}}
    other = {**call, "function": {"name": "other", "arguments": {}}}
    conversation = chat(user("Q"), answer("", tool_calls=(other, call)), user("Q2"), answer("look_up"), tools=(LOOKUP,))
    split = HABITS["appends"].template.replace(
        "<|im_end|>", "<|im_end|>{% for call in m.tool_calls or [] %}{{ call.function.name }}<|im_end|>{% endfor %}"
    )
    one = HABITS["appends"].template.replace(
        "<|im_end|>", "{% for call in (m.tool_calls or [])[-1:] %}{{ call.function.name }}{% endfor %}<|im_end|>"
    )
    reasons = ("leaves out calls", "leaves out calls", "ends answers in their middle")
    for template, reason in zip((HABITS["appends"].template, one, split), reasons, strict=True):
        _, finder = with_habit(tiny_tokenizer, replace(HABITS["appends"], template=TOOLS + template))
        assert reason in str(finder.texts(conversation, "all"))


@pytest.mark.parametrize(
    ("name", "turn", "expected"),
    [
        # The text is a part of the stop token.
        (
            "forgets reasoning",
            answer("end", tool_calls=[{"id": "call00000", "function": {"name": "f", "arguments": {"x": 1}}}]),
            '<think>\n\n</think>\n\nend<call>{"name": "f", "arguments": {"x": 1}}</call><|im_end|>',
        ),
        # The template leaves the text out, and an argument has it, too.
        (
            "dates",
            answer("Paris", tool_calls=[{"id": "call00000", "function": {"name": "f", "arguments": {"x": "Paris"}}}]),
            HABITS["dates"].call(None, "Paris", '{"name": "f", "arguments": {"x": "Paris"}}'),
        ),
        # The reasoning is in a field and in the text.
        ("forgets reasoning", answer("<think>\nHm.\n</think>\n\nA", reasoning="Hm."), "<think>\nHm.\n</think>\n\nA<|im_end|>"),
    ],
)
def test_an_answer_that_says_something_twice_is_trained_once(name, turn, expected, tiny_tokenizer):
    tokenizer, finder = with_habit(tiny_tokenizer, HABITS[name])
    (example,), _ = encode_conversations([chat(user("Q"), turn)], finder, 1000)
    assert [text for _, text in trained([example], tokenizer)] == [expected]


def test_a_template_that_writes_ids_of_calls_only_gets_ids_with_the_functions_names(tiny_tokenizer):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ 'Return of ' + m.tool_call_id + ': ' if m.role == 'tool' }}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<call>{{ call.id }}<args>{{ call.function.arguments | tojson }}</call>{% endfor %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer, finder = with_habit(tiny_tokenizer, Habit(template=template, ends=("<|end|>",), written=lambda *_: ""))

    def calls(*names: str) -> Turn:
        functions = [{"name": name, "arguments": {"x": 1}} for name in names]
        return answer("", tool_calls=[{"id": f"call0000{at}", "function": one} for at, one in enumerate(functions)])

    def result(**more: Any) -> Turn:
        return Turn(role="tool", content="found", **more)

    first = (user("Q1"), calls("find", "add"), result(tool_call_id="call00001"), result())
    conversation = chat(*first, calls("find"), result(), answer("A"))
    (example,), dropped = encode_conversations([conversation], finder, 1000)
    assert not dropped
    named = [Turn(role="tool", content=f"of {name}", name=name) for name in ("add", "find")]
    (other,), _ = encode_conversations([chat(user("Q"), calls("find", "add"), *named, answer("A"))], finder, 1000)
    assert "functions.add:1: of add" in (text := tokenizer.decode(other.input_ids))
    assert "functions.find:0: of find" in text
    texts = [text for _, text in trained([example], tokenizer)]
    one = '<call>functions.{}<args>{{"x": 1}}</call>'.format
    assert texts == [f"{one('find:0')}{one('add:1')}<|end|>", f"{one('find:2')}<|end|>", "A<|end|>"]
    results = re.findall(r"Return of (\S+): found", tokenizer.decode(example.input_ids))
    assert results == ["functions.add:1", "functions.find:0", "functions.find:2"]


def test_options_of_a_template_hold_for_every_prompt_and_a_typo_is_an_error(tiny_tokenizer, caplog):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    template = "{{ effort | tojson }}{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    for value, text in (
        (None, "null"),
        ("a 'null' \"b\"", '"a \'null\' \\"b\\""'),
        ({"x": [True, None, 1.5]}, '{"x": [true, null, 1.5]}'),
    ):
        tokenizer.chat_template = template
        use_chat_template(tokenizer, None, {"effort": value, "strftime_now": "1 May"})
        assert ChatTemplate(tokenizer).prompt((user("Hi"),)) == f"{text}1 MayHi"
    assert "today's date" not in caplog.text
    tokenizer.chat_template = template
    use_chat_template(tokenizer, None, {"effort": 1})
    assert "may write today's date" in caplog.text
    # The text of the template stays as it is, and the others of a tokenizer are kept.
    for own in ("\n  BEGIN{{ x }}", "  {% if x %}1{% endif %}", "{{ x }}"):
        tokenizer.chat_template = {"default": own, "tool_use": "{% for tool in tools %}TOOL{% endfor %}" + own}
        use_chat_template(tokenizer, None, {"x": "\U0001f600"})
        with_option = ChatTemplate(tokenizer).prompt((user("Hi"),))
        assert ChatTemplate(tokenizer).prompt((user("Hi"),), [LOOKUP]).startswith("TOOL")
        tokenizer.chat_template = own.replace("{{ x }}", "\U0001f600").replace("{% if x %}", "{% if 1 %}")
        assert ChatTemplate(tokenizer).prompt((user("Hi"),)) == with_option
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="'efort', which the chat template doesn't read; it reads effort, strftime_now"):
        use_chat_template(tokenizer, None, {"efort": 1})
    with pytest.raises(ValueError, match=r"data.template_options.effort is inf, which has no text"):
        use_chat_template(tokenizer, None, {"effort": float("inf")})
    tokenizer.chat_template = "{% for m in messages %}"
    with pytest.raises(ValueError, match="can't be read"):
        use_chat_template(tokenizer, None, {"effort": 1})
