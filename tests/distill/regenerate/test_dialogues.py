"""Regenerated conversations: exact tokens, boundaries of examples, and dropped answers."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from outrider.data.chat import ChatTemplate, UnboundedTemplateError
from outrider.data.conversations import Conversation, Turn
from outrider.data.loops import LOOP_TOKENS
from outrider.distill.regenerate.answers import AnsweredExample
from outrider.distill.regenerate.dialogues import (
    AFTER_CALL,
    AFTER_CUT,
    AFTER_DROP,
    EMPTY,
    LOOP,
    NO_ROOM,
    Dialogue,
    answer_seed,
    questions,
)
from outrider.distill.regenerate.engine import Answer, Limits

END = 3
LIMITS = Limits(max_new_tokens=100, max_tokens=400)
# Like Qwen's template: thoughts before the last question are not in the prompt.
THINKING_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}<|assistant|>{{ message.content.split('</think>')[-1] }}<|end|>"
    "{%- elif message.role == 'system' -%}[{{ message.content }}]"
    "{%- else -%}<|user|>{{ message.content }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def conversation(*texts: str, system: str | None = None) -> Conversation:
    """Make a conversation of alternating questions and answers, with an optional system prompt."""
    turns = [Turn(role="user" if index % 2 == 0 else "assistant", content=text) for index, text in enumerate(texts)]
    return Conversation(id="chat", turns=(*([Turn(role="system", content=system)] if system else []), *turns))


TWO_TURNS = conversation("hello", "?", "and then", "?")


def play(
    talk: Conversation,
    tokenizer: PreTrainedTokenizerFast,
    answers: Sequence[str | list[int]],
    *,
    limits: Limits = LIMITS,
    cut=(),
) -> tuple[Dialogue, list[list[int]]]:
    """Give a dialogue its answers; return the dialogue and the prompts of its requests.

    An answer that is a text gets a stop token.
    """
    dialogue = Dialogue(talk, tokenizer, template=ChatTemplate(tokenizer), limits=limits, stop_ids=[END], seed=0)
    prompts = []
    answer_iterator = iter(answers)
    while request := dialogue.next_request():
        prompts.append(request.prompt_ids.tolist())
        answer = next(answer_iterator)
        tokens = [*tokenizer(answer).input_ids, END] if isinstance(answer, str) else answer
        dialogue.take(Answer(id=request.id, tokens=torch.tensor(tokens, dtype=torch.long), cut=len(prompts) - 1 in cut))
    assert next(answer_iterator, None) is None, "all answers were asked for"
    return dialogue, prompts


def learned(example: AnsweredExample, tokenizer: PreTrainedTokenizerFast) -> str:
    example_with_mask = example.to_example()
    return str(tokenizer.decode(example_with_mask.input_ids[example_with_mask.loss_mask]))


def test_an_example_continues_while_the_prompt_starts_with_its_tokens(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    dialogue, prompts = play(TWO_TURNS, tiny_tokenizer, ["one two", "three"])
    (example,) = dialogue.examples
    assert tiny_tokenizer.decode(example.input_ids) == (
        "<|user|>hello<|assistant|>one two<|end|><|user|>and then<|assistant|>three<|end|>"
    )
    assert learned(example, tiny_tokenizer) == "one two<|end|>three<|end|>"
    assert [example.input_ids[: span.start] for span in example.answers] == prompts
    assert not dialogue.dropped


def test_a_template_that_drops_earlier_thoughts_starts_a_new_example(tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = THINKING_TEMPLATE
    dialogue, prompts = play(TWO_TURNS, tokenizer, ["<think>hm</think>yes", "<think>so</think>no"])
    first, second = dialogue.examples
    assert tokenizer.decode(first.input_ids) == "<|user|>hello<|assistant|><think>hm</think>yes<|end|>"
    assert tokenizer.decode(second.input_ids) == (
        "<|user|>hello<|assistant|>yes<|end|><|user|>and then<|assistant|><think>so</think>no<|end|>"
    )
    # The prompt has the earlier answer without its thoughts. The target would not generate it like
    # that, so it has no labels.
    assert learned(second, tokenizer) == "<think>so</think>no<|end|>"
    assert second.input_ids[: second.answers[0].start] == prompts[1]
    assert [first.id, second.id] == ["chat#0", "chat#1"]


def test_a_recorded_result_of_a_function_answers_no_other_call(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    called = Turn(
        role="assistant", content="", tool_calls=[{"type": "function", "function": {"name": "look_up", "arguments": {}}}]
    )
    turns = (*TWO_TURNS.turns[:3], called, Turn(role="tool", content="found"), Turn(role="assistant", content="It is."))
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{{ tools | tojson if tools }}" + THINKING_TEMPLATE
    dialogue, prompts = play(replace(TWO_TURNS, turns=turns, tools=tools), tokenizer, ["one two", "three"])
    assert dialogue.dropped == {AFTER_CALL: 1}
    assert all("look_up" in tokenizer.decode(prompt) for prompt in prompts), "the functions are in every prompt"


def test_the_system_prompt_is_in_every_prompt(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = THINKING_TEMPLATE
    talk = conversation("hello", "?", "and then", "?", system="Be brief.")
    _, prompts = play(talk, tokenizer, ["<think>hm</think>yes", "no"])
    assert len(prompts) == 2
    assert all(tokenizer.decode(prompt).startswith("[Be brief.]<|user|>hello") for prompt in prompts)


def test_generated_tokens_are_kept_even_if_the_tokenizer_would_merge_them(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    merged = tiny_tokenizer("import").input_ids
    letters = [id for letter in "import" for id in tiny_tokenizer(letter).input_ids]
    assert len(merged) < len(letters)
    dialogue, _ = play(TWO_TURNS, tiny_tokenizer, [[*letters, END], "three"])
    first, second = dialogue.examples
    assert first.input_ids[first.answers[0].start :] == [*letters, END]
    assert tiny_tokenizer.decode(second.input_ids).startswith("<|user|>hello<|assistant|>import<|end|><|user|>and then")
    assert learned(second, tiny_tokenizer) == "three<|end|>"


def test_special_tokens_inside_an_answer_stay_in_the_next_prompt(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    user = tiny_tokenizer.convert_tokens_to_ids("<|user|>")
    words = tiny_tokenizer("so").input_ids
    dialogue, _ = play(TWO_TURNS, tiny_tokenizer, [[*words, user, *words, END], "three"])
    (example,) = dialogue.examples
    assert user in example.input_ids[example.answers[0].start : example.answers[1].start]


def test_a_cut_answer_is_marked_and_ends_the_conversation(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    words = tiny_tokenizer("one two").input_ids
    dialogue, prompts = play(TWO_TURNS, tiny_tokenizer, [words], cut=[0])
    (example,) = dialogue.examples
    assert [span.cut for span in example.answers] == [True]
    assert len(prompts) == 1
    assert dialogue.dropped == {AFTER_CUT: 1}
    whole, _ = play(TWO_TURNS, tiny_tokenizer, ["one", words], cut=[1])
    assert [span.cut for span in whole.examples[0].answers] == [False, True]
    assert not whole.dropped


def test_answers_longer_than_the_limit_are_cut(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    words = tiny_tokenizer("abcdefgh").input_ids
    for limits in (
        Limits(max_new_tokens=5, max_tokens=400),
        Limits(max_new_tokens=99, max_tokens=len(tiny_tokenizer("<|user|>hello<|assistant|>").input_ids) + 5),
    ):
        dialogue, _ = play(TWO_TURNS, tiny_tokenizer, [[*words, END]], limits=limits)
        (example,) = dialogue.examples
        assert example.input_ids[example.answers[0].start :] == words[:5]
        assert example.answers[0].cut


@pytest.mark.parametrize(
    ("answer", "reason"),
    [([], EMPTY), ([END], EMPTY), ("  \n ", EMPTY), ("ha" * LOOP_TOKENS, LOOP), ([40] * 9, LOOP)],
    ids=repr,
)
def test_degenerate_answers_are_dropped_and_earlier_turns_are_kept(tiny_tokenizer, answer, reason):
    talk = conversation("hello", "?", "and then", "?", "and then", "?")
    limits = Limits(max_new_tokens=200, max_tokens=400)
    dialogue, _ = play(talk, tiny_tokenizer, ["one two", answer], limits=limits)
    (example,) = dialogue.examples
    assert tiny_tokenizer.decode(example.input_ids) == "<|user|>hello<|assistant|>one two<|end|>"
    assert dialogue.dropped == {reason: 1, AFTER_DROP: 1}
    first, _ = play(talk, tiny_tokenizer, [answer], limits=limits)
    assert first.examples == []
    assert first.dropped == {reason: 1, AFTER_DROP: 2}


def test_a_prompt_without_room_for_an_answer_is_dropped_with_later_turns(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    num_prompt_tokens = len(tiny_tokenizer("<|user|>hello<|assistant|>").input_ids)
    full, prompts = play(TWO_TURNS, tiny_tokenizer, [], limits=Limits(max_new_tokens=9, max_tokens=num_prompt_tokens))
    assert (full.examples, prompts, full.dropped) == ([], [], {NO_ROOM: 2})
    later, prompts = play(TWO_TURNS, tiny_tokenizer, ["one"], limits=Limits(max_new_tokens=9, max_tokens=num_prompt_tokens + 5))
    assert len(later.examples) == len(prompts) == 1
    assert later.dropped == {NO_ROOM: 1}


def test_a_conversation_rejected_by_the_template_is_dropped_with_its_message(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}<|user|>hi<|assistant|>"
    )
    dialogue, _ = play(conversation("hello", "?", system="Be brief."), tokenizer, [])
    assert dialogue.dropped == {"rejected by the chat template (no system role)": 1}
    # A record of an odd form, such as a schema with null for a list, raises an error of Python's.
    tokenizer.chat_template = "{% for name in tools[0].required %}{{ name }}{% endfor %}<|user|>hi<|assistant|>"
    dialogue, _ = play(replace(TWO_TURNS, tools=[{"required": None}]), tokenizer, [])
    assert dialogue.dropped == {"rejected by the chat template (TypeError: 'NoneType' object is not iterable)": 2}


def test_a_template_without_bounds_ends_the_run(tiny_tokenizer, monkeypatch):
    """It would take its time for each conversation."""

    def fail(*args: object) -> str:
        raise UnboundedTemplateError("it takes more than 8 seconds")

    monkeypatch.setattr(ChatTemplate, "prompt", fail)
    with pytest.raises(UnboundedTemplateError):
        play(TWO_TURNS, tiny_tokenizer, [])


def test_every_answer_of_the_data_and_a_last_question_become_requests() -> None:
    def asked(*roles: str) -> list[list[str]]:
        turns = [Turn(role=role, content=str(index)) for index, role in enumerate(roles)]  # type: ignore[arg-type]
        return [[turn.content for turn in question] for question in questions(turns)]

    assert asked("system", "user", "assistant", "user", "user", "assistant") == [["0", "1"], ["3", "4"]]
    assert asked("user", "assistant", "user") == [["0"], ["2"]]
    assert asked("user", "assistant", "assistant") == [["0"], []]
    assert asked("user", "assistant", "system") == [["0"]]


def test_a_request_has_the_length_of_the_old_answer(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    talk = conversation("hello", "a longer answer", "and then", "?", "and an open question")
    template = ChatTemplate(tiny_tokenizer)
    dialogue = Dialogue(talk, tiny_tokenizer, template=template, limits=LIMITS, stop_ids=[END], seed=0)
    known = []
    while request := dialogue.next_request():
        known.append(request.num_known_tokens)
        dialogue.take(Answer(id=request.id, tokens=torch.tensor([80, 81, END]), cut=False))
    assert known == [len(tiny_tokenizer("a longer answer").input_ids), 1, None]


def test_seeds_depend_on_the_conversation_and_the_turn_only(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    assert answer_seed(0, "chat", 0) == answer_seed(0, "chat", 0)
    seeds_and_turns = [(seed, id, turn) for seed in (0, 1) for id in ("chat", "chat2", "2/chat") for turn in (0, 1, 2)]
    assert len({answer_seed(*arguments) for arguments in seeds_and_turns}) == len(seeds_and_turns)
    assert all(0 <= answer_seed(*arguments) < 2**31 for arguments in seeds_and_turns)
    template = ChatTemplate(tiny_tokenizer)
    dialogue = Dialogue(TWO_TURNS, tiny_tokenizer, template=template, limits=LIMITS, stop_ids=[END], seed=4)
    request = dialogue.next_request()
    assert request is not None
    assert request.seed == answer_seed(4, "chat", 0)
