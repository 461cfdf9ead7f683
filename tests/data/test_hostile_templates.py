"""Chat templates of strangers: one error that names the template, within a bound of time and memory."""

import copy
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.data import chat
from outrider.data.answers import AnswerFinder
from outrider.data.chat import MAX_SECONDS, ChatTemplate, encode_prompt, use_chat_template
from outrider.data.conversations import Conversation, Turn
from outrider.data.examples import encode_conversations

MOST_SECONDS = 10
BOUND = r"takes more than (1 seconds|10000000 characters|\d+ bytes of memory) for a conversation of 1 turns"
ANSWERED = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
NESTED_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"
SILENT_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FORKING_MACRO = "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}"
DOUBLING = "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
NESTED_VALUE = "{% set n = namespace(x=[]) %}{% for i in range(5000) %}{% set n.x = [n.x] %}{% endfor %}"
FAILING = {
    "division": "{{ 1 / 0 }}",
    "include": "{% include 'other' %}",
    "endless macro": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "range": "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "type": "{{ 'a' + 1 }}",
    "sandbox": "{{ ''.__class__.__mro__ }}",
    "value": "{{ 'a'.index('b') }}",
    "syntax": "{% for m in messages %}",
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "its own error": "{{ raise_exception('no such roles') }}",
    "nested value": NESTED_VALUE + "{{ raise_exception(n.x) }}",
}
ENDLESS = {"loops": NESTED_LOOPS, "silent loops": SILENT_LOOPS, "macros": FORKING_MACRO, "power": "{{ 9 ** (10 ** 9) }}"}
HUGE = {
    "text": "{{ 'x' * 10 ** 8 }}",
    "memory": "{{ 'x' * 10 ** 12 }}",
    "doubling": DOUBLING,
    "padding": "{{ 'x'.ljust(10 ** 10) }}",
    "format": "{{ '%9999999999d' | format(1) }}",
    "list": "{{ ([1] * 10 ** 10) | length }}",
}


@pytest.fixture
def tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return copy.deepcopy(tiny_tokenizer)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the bounds, for templates that use all of them."""
    assert MAX_SECONDS < MOST_SECONDS
    monkeypatch.setattr(chat, "MAX_SECONDS", 1.0)
    monkeypatch.setattr(chat, "MAX_BYTES", 1 << 28)


def require_error(tokenizer: PreTrainedTokenizerFast, template: str, message: str) -> None:
    """Check the error of a prompt, which names the template."""
    tokenizer.chat_template = template
    start = time.monotonic()
    with pytest.raises(ValueError, match=message) as caught:
        encode_prompt([Turn(role="user", content="Hi")], tokenizer)
    assert repr(template[:60]) in str(caught.value)
    assert time.monotonic() - start < MOST_SECONDS


@pytest.mark.parametrize("template", FAILING.values(), ids=FAILING)
def test_a_template_that_fails_is_an_error_that_names_it(tokenizer, template):
    require_error(tokenizer, template, "the chat template of .* fails for a prompt of 1 turns")
    turns = (Turn(role="user", content="Hi"), Turn(role="assistant", content="Yes."))
    with pytest.raises(ValueError, match="the chat template of"):
        encode_conversations([Conversation(id="a", turns=turns)], AnswerFinder(tokenizer, [3]), 64)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    "template",
    [pytest.param(text, marks=[] if name == "loops" else pytest.mark.slow, id=name) for name, text in ENDLESS.items()],
)
def test_a_template_without_an_end_is_an_error_within_the_bound_of_time(tokenizer, template):
    require_error(tokenizer, template, BOUND)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("template", HUGE.values(), ids=HUGE)
def test_a_template_of_huge_texts_is_an_error_before_this_process_has_them(tokenizer, template):
    require_error(tokenizer, template, BOUND)


@pytest.mark.usefixtures("hurried")
def test_a_template_that_repeats_only_for_some_conversations_ends_the_run_there(tokenizer):
    """Once such a conversation was dropped, after the time of each."""
    tokenizer.chat_template = ANSWERED + "{% if messages | length > 3 %}" + SILENT_LOOPS + "{% endif %}"
    turns = (Turn(role="user", content="Hi"), Turn(role="assistant", content="Yes."))
    conversations = [Conversation(id=str(n), turns=turns * n) for n in (1, 2, 2, 2)]
    assert len(encode_conversations(conversations[:1], AnswerFinder(tokenizer, [3]), 64)[0]) == 1
    with pytest.raises(ValueError, match="takes more than 1 seconds for a conversation of 4 turns"):
        encode_conversations(conversations, AnswerFinder(tokenizer, [3]), 64)


def test_the_bounds_end_with_the_rendering_and_hold_for_the_main_thread_only(tokenizer):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.getsignal(signal.SIGVTALRM)
    prompt = [Turn(role="user", content="Hi")]
    with ThreadPoolExecutor() as pool:
        elsewhere = pool.submit(encode_prompt, prompt, tokenizer).result()
    assert encode_prompt(prompt, tokenizer).tolist() == elsewhere.tolist()
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert signal.getsignal(signal.SIGVTALRM) is handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_one_thread_at_a_time_lowers_the_memory_of_the_process(tokenizer):
    thread = threading.Thread(target=encode_prompt, args=([Turn(role="user", content="Hi")], tokenizer))
    with chat._bounded(1, "the template"):
        thread.start()
        thread.join(0.1)
        assert thread.is_alive(), "it would restore this thread's limit as the process's own"
    thread.join(10)
    assert not thread.is_alive()


def test_a_long_conversation_is_no_long_template(tokenizer):
    tokenizer.chat_template = ANSWERED
    assert encode_prompt([Turn(role="user", content="a" * 30)], tokenizer).shape[1] > 0
    text = "Hi " * 4_000_000
    assert len(text) > chat.MAX_CHARS
    assert len(ChatTemplate(tokenizer).text([Turn(role="user", content=text)])) == len(text) + 4


def test_a_template_file_that_is_no_text_is_named(tokenizer, tmp_path):
    (tmp_path / "a.jinja").write_bytes(b"\xff\xfe{{ 1 }}")
    with pytest.raises(ValueError, match=r"a.jinja', which is not UTF-8 text"):
        use_chat_template(tokenizer, str(tmp_path / "a.jinja"))
