"""Regeneration by a server that speaks OpenAI's completions protocol, such as vLLM, for targets that need a cluster.

Prompts go out as token ids, so that the server's chat template and tokenizer have no say. Whether the server runs the very
target can't be seen from here: the labelling that follows says how far the target agrees with its answers.
"""

import logging
import os
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import torch
from transformers import PreTrainedTokenizerBase

from ....models.decoding.sampling import Sampling
from ..engine import Answer, Limits, Request

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

KEY_VARIABLE = "OPENAI_API_KEY"
DEFAULT_IN_FLIGHT = 64
MAX_TRIES = 8
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
"""Between tries; each wait is twice the one before, so that a server has some minutes to come back."""
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 1800.0
"""An answer may wait in the server's queue for long."""
TOO_MANY_REQUESTS, SERVER_ERRORS = 429, range(500, 600)
MOST_BODY_CHARS = 300

Field = TypeVar("Field")

# Servers fill in what is left out, some of them from the model's generation config: no filter that nobody asked for.
NEUTRAL = {
    "top_k": -1,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class CompletionsServer:
    """A server, asked from several threads, and hung up on from any of them."""

    def __init__(self, client: "httpx.Client") -> None:
        self.url = str(client.base_url)
        self._client = client
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._lock = threading.Lock()
        self._hung_up = threading.Event()

    def ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """The server's answer, as parsed JSON. Asks again, with growing waits, while it is unreachable, overloaded or broken.

        Raises ValueError where it refuses the request, and ConnectionError where it doesn't come back, or was hung up on.
        """
        import httpx

        for attempt in range(1, MAX_TRIES + 1):
            self._refuse_if_hung_up()
            try:
                response = self._client.request(method, path, json=body, extensions={"trace": self._trace})
                if response.is_success:
                    return _parsed(response)
                problem = f"it answers {response.status_code}: {_shown(response.text)}"
                if response.status_code != TOO_MANY_REQUESTS and response.status_code not in SERVER_ERRORS:
                    raise ValueError(
                        f"{self.url}{path} refuses the request; {problem}. Check distill.base_url, distill.served_model, "
                        f"{KEY_VARIABLE}, and that the server's context window is the target's"
                    )
                asked_seconds = _retry_after(response)
            except httpx.TransportError as error:
                problem, asked_seconds = f"it can't be reached ({type(error).__name__}: {_shown(str(error))})", 0.0
            self._refuse_if_hung_up()
            if attempt < MAX_TRIES:
                seconds = min(max(FIRST_WAIT_SECONDS * 2 ** (attempt - 1), asked_seconds), LONGEST_WAIT_SECONDS)
                logger.warning("%s: %s; try %d of %d follows in %.1f s", self.url, problem, attempt + 1, MAX_TRIES, seconds)
                self._hung_up.wait(seconds)
        raise ConnectionError(
            f"{self.url}{path} failed {MAX_TRIES} times; at last {problem}. Start the server anew and run the same command: "
            "finished shards are kept"
        )

    def hang_up(self) -> None:
        """End all requests, for good: those that wait for an answer, those that wait to be tried again, and any later one.

        To close the client would not do: a thread that reads from a socket doesn't see that it is closed, only that it is
        shut down.
        """
        with self._lock:
            self._hung_up.set()
            for connected in self._sockets:
                _shut_down(connected)

    def _refuse_if_hung_up(self) -> None:
        if self._hung_up.is_set():
            raise ConnectionError(f"{self.url} was hung up on, since answers are no longer waited for; open it anew")

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        """Keep each connection's socket, by httpx's extension `trace`, which tells of it as soon as it is there."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            connected = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.add(connected)
                if self._hung_up.is_set():
                    _shut_down(connected)


@contextmanager
def open_server(base_url: str) -> Iterator[CompletionsServer]:
    """The server at `base_url`, hung up on at the end. The key, where one is needed, is read from the environment only."""
    import httpx

    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=base_url.rstrip("/") + "/", headers=headers, timeout=timeout, limits=limits) as client:
        server = CompletionsServer(client)
        try:
            yield server
        finally:
            server.hang_up()


def find_model(server: CompletionsServer, wanted: str | None, target_name: str) -> str:
    """The name under which the server has the target: `wanted`, the target's own, or that of its only model.

    Raises ValueError, naming what is served, where that leaves it open.
    """
    body = server.ask("GET", "models", None)
    try:
        served = [str(model["id"]) for model in body["data"]]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{server.url}models lists no models; is distill.base_url the address of a completions server?"
        ) from error
    if wanted is not None and wanted not in served:
        raise ValueError(f"distill.served_model is {wanted!r}, and {server.url} serves {', '.join(served) or 'nothing'}")
    if wanted is not None or target_name in served:
        return wanted or target_name
    if len(served) != 1:
        raise ValueError(
            f"{server.url} serves {', '.join(served) or 'nothing'}, and the target is {target_name!r}; set "
            "distill.served_model to the target's name there"
        )
    return served[0]


class OpenAIEngine:
    """Several requests in flight, each by a thread of its own, which mostly waits.

    Each request carries its seed. Servers batch requests as they come, so that rounding, and with it a text, may differ from
    run to run.
    """

    def __init__(
        self,
        server: CompletionsServer,
        *,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        stop_ids: Collection[int],
        sampling: Sampling,
        limits: Limits,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
    ) -> None:
        self._server = server
        self._model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = tuple(stop_ids)
        self._sampling = sampling
        self._limits = limits
        self._max_in_flight = max_in_flight
        self._warned: set[str] = set()

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """An answer to every request, as they come in. Raises ValueError where the server refuses one or reads another prompt,
        ConnectionError where it is gone for good.

        Left before the last answer, it hangs up, so that nobody waits for those in flight; the engine is of no use then.
        """
        pool = ThreadPoolExecutor(self._max_in_flight, thread_name_prefix="openai")
        futures: list[Future[Answer]] = []
        try:
            futures.extend(pool.submit(self._complete, request) for request in requests)
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if not all(future.done() for future in futures):
                self._server.hang_up()

    def _complete(self, request: Request) -> Answer:
        max_tokens = self._limits.room(len(request.prompt_ids))
        body = {
            **NEUTRAL,
            "model": self._model,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": max_tokens,
            "temperature": self._sampling.temperature,
            "seed": request.seed,
            "stop_token_ids": list(self._stop_ids),
            "skip_special_tokens": False,  # of the text, where that is all that comes back
            "return_token_ids": True,
        }
        body |= {name: value for name in ("top_k", "top_p") if (value := getattr(self._sampling, name)) is not None}
        reply = self._server.ask("POST", "completions", body)
        try:
            completion = _completion(reply)
        except ValueError as error:
            raise ValueError(
                f"{self._server.url}completions answers {_shown(str(reply))}, which is no completion: {error}; is "
                "distill.base_url the address of a completions server?"
            ) from error
        return self._checked(request, completion, max_tokens)

    def _checked(self, request: Request, completion: "_Completion", max_tokens: int) -> Answer:
        url = self._server.url
        if completion.num_prompt_tokens not in (None, len(request.prompt_ids)):
            raise ValueError(
                f"{url} read {completion.num_prompt_tokens} tokens of a prompt of {len(request.prompt_ids)}: it adds tokens to "
                "prompts, or cuts them; turn that off in the server"
            )
        if completion.finish not in ("stop", "length"):
            raise ValueError(f"{url} ended an answer by {completion.finish!r}; only 'stop' and 'length' are known")
        tokens = self._tokens(completion, max_tokens)
        is_cut = completion.finish == "length"
        if not is_cut and not (tokens and tokens[-1] in self._stop_ids):
            tokens.append(self._stop_token(completion))
        if not all(0 <= token < self._vocab_size for token in tokens):
            raise ValueError(f"{url} answers with tokens that the target doesn't have; is it another model?")
        return Answer(id=request.id, tokens=torch.tensor(tokens, dtype=torch.long), cut=is_cut)

    def _tokens(self, completion: "_Completion", max_tokens: int) -> list[int]:
        """The answer's ids: the server's own, else its text's, which may be more than the model wrote."""
        url = self._server.url
        if completion.token_ids is not None:
            if len(completion.token_ids) > max_tokens:
                raise ValueError(
                    f"{url} answers with {len(completion.token_ids)} tokens where max_tokens asks for {max_tokens} at most: it "
                    "ignores that limit; use a server that keeps it, such as vLLM"
                )
            return list(completion.token_ids)
        self._warn_once(
            "%s answers with text, not with token ids: it is tokenized again, and may differ from what the model wrote "
            "(vLLM 0.10.2 and later send ids)",
            url,
        )
        tokens = list(self._tokenizer(completion.text, add_special_tokens=False, verbose=False).input_ids)
        if len(tokens) > max_tokens:
            self._warn_once(
                "%s answers with a text of %d tokens where max_tokens asks for %d at most: such answers are cut there. Either "
                "the text has more tokens than the model wrote, or the server ignores that limit",
                url,
                len(tokens),
                max_tokens,
            )
        return tokens

    def _warn_once(self, message: str, *args: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *args)

    def _stop_token(self, completion: "_Completion") -> int:
        """The token that ended the answer, which many servers leave out: as told, else the tokenizer's, else the first."""
        candidates = (completion.stop_reason, self._tokenizer.eos_token_id)
        return next((token for token in candidates if token in self._stop_ids), self._stop_ids[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Completion:
    """What a reply says, by the protocol's types: ids, text or both."""

    finish: str | None
    token_ids: list[int] | None
    text: str
    stop_reason: int | None
    """A token; servers name a string that stopped them here too, and none was asked for."""
    num_prompt_tokens: int | None
    """None where the server doesn't tell."""


def _completion(reply: Any) -> _Completion:
    """The first choice of a parsed reply. Raises ValueError, with the rule, where it isn't made as the protocol says."""
    choices = _field(reply, "choices", list)
    if not choices:
        raise ValueError("it must have a choice")
    (choice, *_) = choices
    token_ids, text = _field(choice, "token_ids", list), _field(choice, "text", str)
    if token_ids is None and text is None:
        raise ValueError("a choice must have token_ids or text")
    if wrong := [token for token in token_ids or () if type(token) is not int]:
        raise ValueError(f"token_ids must be integers, and one is {_shown(repr(wrong[0]))}")
    usage = _field(reply, "usage", dict)
    stop_reason = choice.get("stop_reason")
    return _Completion(
        finish=_field(choice, "finish_reason", str),
        token_ids=token_ids,
        text=text or "",
        stop_reason=stop_reason if type(stop_reason) is int else None,
        num_prompt_tokens=None if usage is None else _field(usage, "prompt_tokens", int),
    )


def _field(place: Any, name: str, kind: type[Field]) -> Field | None:
    """What `place` has under the name; None where it has nothing or null. true is no int."""
    if not isinstance(place, dict):
        raise ValueError(f"{name} must be in an object, and is looked for in {_shown(repr(place))}")
    value = place.get(name)
    if value is None or type(value) is kind:
        return value
    raise ValueError(f"{name} must be of type {kind.__name__}, and is {_shown(repr(value))}")


def _shut_down(connected: socket.socket) -> None:
    with suppress(OSError):  # it may have ended by itself
        connected.shutdown(socket.SHUT_RDWR)


def _parsed(response: "httpx.Response") -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise ValueError(
            f"{response.url} answers with what is no JSON: {_shown(response.text)}; is distill.base_url the address of a "
            "completions server?"
        ) from error


def _retry_after(response: "httpx.Response") -> float:
    """The seconds that the server asks for; 0 where it doesn't, or names a date."""
    try:
        return float(response.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0


def _shown(text: str) -> str:
    """What may be shown of a server's message: its beginning, without the key, which some of them repeat."""
    key = os.environ.get(KEY_VARIABLE)
    return (text.replace(key, "***") if key else text)[:MOST_BODY_CHARS]
