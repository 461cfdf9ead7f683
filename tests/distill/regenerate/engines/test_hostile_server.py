"""The engine that asks a server, and a server that means harm: time, size, ids, and what is kept."""

import gzip
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("openai")  # pip install 'outrider[openai]'

from outrider.distill.config import DistillConfig
from outrider.distill.regenerate.engine import Limits, Request
from outrider.distill.regenerate.engines import openai
from outrider.distill.regenerate.engines.registry import open_engine
from outrider.models.llm.hf_target import HFTarget

from ...completions import Attack, Handler, Server, running

MOST_SECONDS = 20.0
GOOD = {"finish_reason": "stop", "token_ids": [5, 6, 3], "stop_reason": 3}


def sends(value: Any, status: int = 200, **headers: str) -> Attack:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda handler: handler.reply(status, {name.replace("_", "-"): text for name, text in headers.items()}, body)


def endless(part: bytes, pause_seconds: float) -> Attack:
    """Return an attack that sends a part again and again."""

    def attack(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True
        while not handler.server.woken.wait(pause_seconds):
            handler.wfile.write(part)
            handler.wfile.flush()

    return attack


def cut(handler: Handler) -> None:
    """Close the connection in the middle of a reply."""
    handler.reply(200, {"Content-Length": "1000"}, b'{"choices": [')
    handler.close_connection = True


@pytest.fixture
def hostile(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv(openai.KEY_VARIABLE, raising=False)
    monkeypatch.setattr(openai, "MAX_RETRIES", 1)
    monkeypatch.setattr(openai, "ANSWER_SECONDS", 0.8)
    monkeypatch.setattr(openai, "LIST_SECONDS", 0.4)
    monkeypatch.setattr(openai, "MOST_REPLY_BYTES", 100_000)
    with running(Server(target)) as server:
        yield server


@pytest.fixture
def ask(hostile: Server, target: HFTarget, limits: Limits, requests: list[Request]) -> Callable[[], list[list[int]]]:
    """Return a function that asks for two answers, which must end soon."""

    def ask() -> list[list[int]]:
        started = time.monotonic()
        try:
            config = DistillConfig(engine="openai", base_url=hostile.url)
            with open_engine(config, target, limits) as engine:
                return [answer.tokens.tolist() for answer in engine.answer(requests[:2])]
        finally:
            assert time.monotonic() - started < MOST_SECONDS

    return ask


SOON = {"Retry_After": "0.01"}
COMPLETIONS = {
    "a slow drip": (endless(b" ", 0.05), ConnectionError, "no complete reply within"),
    "an endless stream": (endless(b"x" * 10_000, 0.0), ValueError, "answers with more than 100,000 bytes"),
    "a bomb of gzip": (
        sends(gzip.compress(bytes(10**6)), Content_Encoding="gzip"),
        ValueError,
        "answers with more than 100,000 bytes",
    ),
    "a disconnect": (cut, ConnectionError, "failed 2 times; at last it can't be reached"),
    "no JSON": (sends(b"{choices"), ValueError, "isn't a reply of this protocol.*Invalid JSON"),
    "JSON nested without end": (sends(b"[" * 50_000), ValueError, "isn't a reply of this protocol"),
    "half a surrogate": (
        sends(b'{"choices": [{"finish_reason": "stop", "text": "\\ud800"}]}'),
        ValueError,
        "isn't a reply of this protocol",
    ),
    "a storm of 429": (sends({"error": "slow"}, 429, **SOON), ConnectionError, "failed 2 times; at last it answers 429"),
    "429 for a minute": (sends({"error": "slow"}, 429, Retry_After="59"), ConnectionError, "no complete reply within"),
    "a refusal with escapes": (sends(b"\x1b[2Jgone", 400), ValueError, r"answers 400:  \[2Jgone"),
    "ids beyond the vocabulary": (
        sends({"choices": [{**GOOD, "token_ids": [10**15]}]}),
        ValueError,
        "tokens that the target doesn't have",
    ),
    "a number of 400 digits": (
        sends(b'{"choices": [{"finish_reason": "stop", "token_ids": [' + b"9" * 400 + b"]}]}"),
        ValueError,
        "isn't a reply of this protocol|tokens that the target doesn't have",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_hostile_completion_is_one_clear_error_in_bounded_time(ask, hostile, name):
    hostile.attack, error, message = COMPLETIONS[name]
    with pytest.raises(error, match=message) as caught:
        ask()
    assert hostile.bodies
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("models", "error", "message"),
    [
        (endless(b" ", 0.05), ConnectionError, "no complete reply within"),
        (sends({"data": [{"id": "m" * 50_000}, {"id": "n"}]}), ValueError, "serve the target under this name"),
        (sends({"data": [{"id": "\x1b[2Ja"}, {"id": "b"}]}), ValueError, r"serves  \[2Ja, b"),
    ],
)
def test_a_hostile_list_of_models_is_one_clear_error_in_bounded_time(ask, hostile, models, error, message):
    hostile.attack_on_models = models
    with pytest.raises(error, match=message) as caught:
        ask()
    assert not hostile.bodies
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()
