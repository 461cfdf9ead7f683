"""The engine for servers with OpenAI's completions API, with a local server."""

import asyncio
import gc
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("openai")  # pip install 'outrider[openai]'

from outrider.distill.config import DistillConfig
from outrider.distill.regenerate.engine import Limits, Request
from outrider.distill.regenerate.engines import openai
from outrider.distill.regenerate.engines.decoder import DecoderEngine
from outrider.distill.regenerate.engines.registry import open_engine
from outrider.models.decoding import Sampling
from outrider.models.drafters import NullDrafter
from outrider.models.llm.hf_target import HFTarget

from ...completions import Server, running


@pytest.fixture
def server(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv(openai.KEY_VARIABLE, raising=False)
    with running(Server(target)) as server:
        yield server


Found = dict[str, tuple[list[int], bool]]


@pytest.fixture
def ask(server: Server, target: HFTarget, limits: Limits, requests: list[Request]) -> Callable[..., Found]:
    """Return a function that answers all requests through the engine of a configuration."""

    def ask(**options: Any) -> Found:
        config = DistillConfig(engine="openai", base_url=server.url, **options)
        with open_engine(config, target, limits) as engine:
            return {answer.id: (answer.tokens.tolist(), answer.cut) for answer in engine.answer(requests)}

    return ask


def expected(target: HFTarget, requests: list[Request], limits: Limits, sampling: Sampling) -> Found:
    engine = DecoderEngine(target, NullDrafter(), sampling=sampling, limits=limits)
    return {answer.id: (answer.tokens.tolist(), answer.cut) for answer in engine.answer(requests)}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_the_servers_tokens_with_the_requested_sampling(ask, server, target, requests, limits, temperature):
    actual = ask(temperature=temperature, top_k=40)
    assert actual == expected(target, requests, limits, Sampling(temperature=temperature, top_k=40))
    assert {cut for _, cut in actual.values()} == {True, False}
    assert len(server.bodies) == len(requests)
    for body in server.bodies:
        # A server fills in missing values, maybe from the model's generation config.
        assert (body["top_k"], body["top_p"], body["repetition_penalty"], body["min_p"]) == (40, 1.0, 1.0, 0.0)
        assert body["stop_token_ids"] == list(target.stop_ids)
        assert body["model"] == "tiny"
    assert server.keys == {"Bearer none"}


def test_a_stop_token_missing_in_a_reply_is_added_from_its_stop_reason(ask, server, target, requests, limits):
    def leave_out(reply: dict[str, Any]) -> None:
        choice = reply["choices"][0]
        if choice["finish_reason"] == "stop":
            choice["token_ids"] = choice["token_ids"][:-1]

    server.change = leave_out
    assert ask() == expected(target, requests, limits, Sampling(temperature=0.0))


SOON = {"Retry-After": "0.01"}


def test_failed_requests_are_retried_and_no_answer_is_lost(ask, server, target, requests, limits):
    server.faults = [(503, SOON, b"loading"), None, (429, {"Retry-After": "0.6"}, b"slow down"), (500, SOON, b"oops")]
    started = time.monotonic()
    assert ask(decode_batch_size=1) == expected(target, requests, limits, Sampling(temperature=0.0))
    assert server.faults == []
    assert time.monotonic() - started > 0.6


def test_an_unavailable_server_is_an_error_with_the_remedy(ask, server, monkeypatch):
    monkeypatch.setattr(openai, "MAX_RETRIES", 2)
    server.faults = [(503, SOON, b"loading")] * 100
    with pytest.raises(ConnectionError, match=r"failed 3 times; at last it answers 503: loading.*finished shards are kept"):
        ask()
    server.faults = [(429, {"Retry-After": "86400"}, b"slow down")] * 100
    with pytest.raises(ConnectionError, match=r"failed once; it answers 429: slow down \(Retry-After: 86400; .* two minutes"):
        ask(decode_batch_size=1)
    monkeypatch.setattr(openai, "MAX_RETRIES", 0)
    server.server_close()
    with pytest.raises(ConnectionError, match="can't be reached .*ConnectError"):
        ask()


def test_a_missing_client_is_reported_with_the_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'outrider\[openai\]'"), openai.open_server("http://127.0.0.1:9/v1"):
        pass


def test_an_authentication_error_is_raised_at_once_without_the_key(ask, server, monkeypatch, caplog):
    monkeypatch.setenv(openai.KEY_VARIABLE, "sk-very-secret")
    server.faults = [(401, {}, b"the key sk-very-secret is unknown")] * 100
    with caplog.at_level(logging.DEBUG), pytest.raises(ValueError, match="answers 401: the key .* is unknown") as error:
        ask(decode_batch_size=1)
    assert server.keys == {"Bearer sk-very-secret"}
    assert len(server.faults) > 90
    assert "sk-very-secret" not in str(error.value) + caplog.text


def test_a_redirect_is_an_error_at_once_with_the_address(ask: Callable[..., Found], server: Server) -> None:
    """A client that follows redirects would retry loops and unknown protocols for minutes."""
    server.faults = [(307, {"Location": "/v1/completions"}, b"")] * 100
    with pytest.raises(ValueError, match="answers 307: /v1/completions. Check distill.base_url"):
        ask(decode_batch_size=1)
    assert len(server.faults) > 90


def test_text_without_token_ids_is_tokenized_again_with_one_warning(ask, server, target, requests, limits, caplog):
    server.change = lambda reply: reply["choices"][0].pop("token_ids")
    with caplog.at_level(logging.WARNING, logger="outrider"):
        actual = ask(decode_batch_size=1)
    assert caplog.text.count("tokenized again") == 1
    wanted = expected(target, requests, limits, Sampling(temperature=0.0))
    visited = 0
    for id, (tokens, cut) in wanted.items():
        text = target.tokenizer.decode(tokens if cut else tokens[:-1])
        assert actual[id] == (target.tokenizer(text).input_ids + ([] if cut else tokens[-1:]), cut)
        visited += 1
    assert visited == len(requests)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda reply: reply["usage"].update(prompt_tokens=1000), "read 1000 tokens of a prompt of"),
        (lambda reply: reply["choices"][0].update(token_ids=[999], text=None), "tokens that the target doesn't have"),
        (
            lambda reply: reply["choices"][0].update(finish_reason="content_filter"),
            "finish_reason: Input should be 'stop' or 'length'",
        ),
        (lambda reply: reply.clear(), "choices: Field required"),
        (lambda reply: reply["choices"][0].update(token_ids=[True]), "token_ids.0: Input should be a valid integer"),
        (lambda reply: reply["choices"][0].update(token_ids=None, text=None), "must have token_ids or text"),
        (lambda reply: reply["choices"][0].update(token_ids=[5] * 99), "99 tokens, more than max_tokens="),
    ],
)
def test_an_invalid_reply_is_an_error_that_names_the_field(ask, server, requests, change, message):
    server.change = change
    del requests[1:]
    with pytest.raises(ValueError, match=message):
        ask()


def test_a_reply_without_token_counts_is_accepted(ask, server, target, requests, limits) -> None:
    del requests[1:]
    for usage in (None, {}):
        server.change = lambda reply, usage=usage: reply.update(usage=usage)
        assert ask() == expected(target, requests, limits, Sampling(temperature=0.0))


@pytest.mark.parametrize("stop_reason", [True, "</s>"])
def test_a_stop_reason_that_is_no_token_id_is_ignored(ask, server, target, requests, stop_reason) -> None:
    del requests[1:]
    assert target.model.generation_config is not None
    target.model.generation_config.eos_token_id = [3, 1, 4]
    server.change = lambda reply: reply["choices"][0].update(
        token_ids=[7], text=None, finish_reason="stop", stop_reason=stop_reason
    )
    actual = ask()
    assert {tuple(tokens) for tokens, _ in actual.values()} == {(7, target.tokenizer.eos_token_id)}


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_an_answer_that_goes_on_after_a_stop_token_is_cut_there(ask, server, target, requests, finish_reason, caplog):
    tokens = [7, target.stop_ids[0], 8]
    del requests[1:]
    server.change = lambda reply: reply["choices"][0].update(token_ids=tokens, finish_reason=finish_reason)
    with caplog.at_level(logging.WARNING, logger="outrider"):
        assert ask() == {request.id: (tokens[:2], False) for request in requests}
    assert caplog.text.count("writes on after a stop token") == 1


@pytest.mark.parametrize("nothing", [{"token_ids": None, "text": ""}, {"token_ids": []}])
def test_an_answer_cut_before_its_first_token_is_an_empty_one(ask, server, requests, nothing):
    del requests[1:]
    server.change = lambda reply: reply["choices"][0].update(finish_reason="length", **nothing)
    assert ask() == {request.id: ([], True) for request in requests}


def test_a_text_longer_than_requested_is_one_warning(ask, server, requests, caplog) -> None:
    del requests[2:]
    server.change = lambda reply: reply["choices"][0].update(token_ids=None, text="a b c d " * 1_000_000)
    with caplog.at_level(logging.WARNING, logger="outrider"):
        answers = ask(decode_batch_size=1)
    assert all(len(tokens) < 1000 for tokens, _ in answers.values()), "only what a longest answer may have is tokenized"
    assert caplog.text.count("such answers are cut there") == 1


def test_requests_in_flight_never_exceed_decode_batch_size(ask: Callable[..., Found], server: Server) -> None:
    server.delay_seconds = 0.05
    ask(decode_batch_size=3)
    assert server.most_inside == 3


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Check that the block and every thread of the engine end soon.

    The interpreter waits for threads when it exits.
    """
    start = time.monotonic()
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("openai"):
            thread.join(timeout=max(0.0, start + 2 - time.monotonic()))
            assert not thread.is_alive(), "a thread still waits for the server"
    assert time.monotonic() - start < 2


def test_closing_the_engine_early_does_not_wait_for_requests_in_flight(server, target, limits, requests):
    server.num_quick = 1
    config = DistillConfig(engine="openai", base_url=server.url, decode_batch_size=3)
    with ends_at_once(), open_engine(config, target, limits) as engine:
        answers = engine.answer(requests)
        next(answers)
        until(lambda: server.num_inside == 3)
        answers.close()  # type: ignore[attr-defined]
        server.num_quick = None
        assert [answer.id for answer in engine.answer(requests[:1])] == ["r0"]


@pytest.mark.parametrize("waits_for", ["answers", "tries"])
def test_ctrl_c_waits_for_no_answer_and_no_retry(server, target, limits, requests, waits_for):
    server.num_quick = 0
    if waits_for == "tries":
        server.num_quick, server.faults = None, [(503, {"Retry-After": "30"}, b"loading")] * 4
    config = DistillConfig(engine="openai", base_url=server.url, decode_batch_size=4)

    def interrupt() -> None:
        until(lambda: server.num_inside == 4 if waits_for == "answers" else not server.faults and server.num_inside == 0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def consume() -> None:
        with open_engine(config, target, limits) as engine:
            interrupter.start()
            list(engine.answer(requests))

    interrupter = threading.Thread(target=interrupt)
    # Background jobs of a shell ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ends_at_once(), pytest.raises(KeyboardInterrupt):
            consume()
    finally:
        signal.signal(signal.SIGINT, before)
    interrupter.join()


@pytest.mark.parametrize("num_steps", range(6))
def test_a_request_that_ends_while_it_connects_leaves_nothing_behind(num_steps: int) -> None:
    """The client connects in a task of its own, which may not have begun."""

    async def stand_still(until_closing: threading.Event) -> None:
        for _ in range(num_steps):
            await asyncio.sleep(0)
        until_closing.wait()

    closes = threading.Event()
    with openai.open_server("http://127.0.0.1:9/v1") as server:
        server.submit(server.ask("models", openai._Models))
        server.submit(stand_still(closes))
        threading.Timer(0.05, closes.set).start()
    gc.collect()  # a coroutine that was never awaited warns here


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_requests_name_the_model_that_the_server_has(ask: Callable[..., Found], server: Server, target: HFTarget) -> None:
    server.models = ["other", target.identity.name]
    ask()
    assert {body["model"] for body in server.bodies} == {target.identity.name}
    server.models = ["other", "another"]
    with pytest.raises(ValueError, match=r"serves other, another.*serve the target under this name"):
        ask()
    server.models = ["another"]
    ask()
    assert server.bodies[-1]["model"] == "another"
