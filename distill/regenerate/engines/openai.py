"""Regeneration by a server of the completions protocol, such as vLLM, for large targets.

Prompts are sent as token ids, so the server's chat template and tokenizer are not used. The
protocol doesn't show whether the server runs the right target, with its tokenizer. Labelling reports
later how often the target agrees with the answers.
"""

import asyncio
import importlib.util
import logging
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from ....data.servers import KEY_VARIABLE, NO_FILTERS, server_key, shown
from ....models.decoding.sampling import Sampling
from ..engine import Answer, Limits, Request
from .states_files import Transfer, drop_states

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)
T = TypeVar("T")
Reply = TypeVar("Reply", bound=BaseModel)

NO_KEY = "none"
"""The client requires a key, and most local servers have none."""
DEFAULT_IN_FLIGHT = 64
MAX_RETRIES = 20
"""Retries of the client, which waits up to 8 s between them: a server has two minutes to come
back. If the server asks for a pause (Retry-After), the client waits so long, and it gives up at once
if the pause is longer than two minutes."""
CONNECT_SECONDS, LIST_SECONDS, ANSWER_SECONDS = 10.0, 180.0, 1800.0
"""Timeouts of a connection, of the list of models and of an answer, the last two with all retries. An
answer may wait long in the server's queue. A server that sends a byte now and then must not hold the
run up for ever."""
MOST_REPLY_BYTES = 16 << 20
"""Most bytes of a reply, which has a few dozen bytes per token."""
RETRIED_STATUS = {408, 409, 429, *range(500, 600)}
"""Status codes that the client retries. Any other error status means that the server rejected the
request."""
RESUME = "Start the server again and run the same command: finished shards are kept"


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class _Choice(BaseModel):
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None
    text: str | None = None
    stop_reason: Any = None
    """A token, or a string that stopped the answer; our requests contain no such string."""

    @model_validator(mode="after")
    def _require_an_answer(self) -> "_Choice":
        if self.token_ids is None and self.text is None:
            raise ValueError("a choice must have token_ids or text")
        return self


class _Usage(BaseModel):
    prompt_tokens: int | None = None


class ServedStatesReply(BaseModel):
    """What vLLM adds to a reply: where it has written the hidden states."""

    kv_transfer_params: Transfer | None = None


class Completion(ServedStatesReply):
    """A reply to a prompt."""

    choices: tuple[_Choice]
    usage: _Usage | None = None


class CompletionsServer:
    """A server, and the event loop in another thread that runs its requests."""

    def __init__(self, client: "AsyncOpenAI", loop: asyncio.AbstractEventLoop) -> None:
        self.url = str(client.base_url)
        self._client = client
        self._loop = loop
        self._requests: set[Future[Any]] = set()

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `call` in the server's event loop. Cancelling the future cancels the request."""
        request = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        return request

    async def ask(self, path: str, kind: type[Reply], body: dict[str, Any] | None = None) -> Reply:
        """Return the server's reply; the client retries while the server is unreachable or
        overloaded.

        Raises ValueError if the server rejects the request or its reply is invalid, and
        ConnectionError if it doesn't come back or takes too long.
        """
        # 1. Send the request. The client has retried all errors that it can.
        from openai import APIConnectionError, APIStatusError

        seconds = LIST_SECONDS if body is None else ANSWER_SECONDS
        try:
            async with asyncio.timeout(seconds):
                if body is None:
                    text = await self._client.get(path, cast_to=str)
                else:
                    text = await self._client.post(path, cast_to=str, body=body)
            return kind.model_validate_json(text, strict=True)
        except TimeoutError:
            raise ConnectionError(
                f"{self.url}{path} gave no complete reply within {seconds:.0f} s, with all retries. {RESUME}"
            ) from None
        except APIConnectionError as error:
            num_tries = _num_tries(error)
            problem = f"can't be reached ({type(error.__cause__).__name__}: {shown(str(error.__cause__))})"
        except APIStatusError as error:
            num_tries = _num_tries(error)
            location = error.response.headers.get("location", "")  # redirects aren't followed
            problem = f"answers {error.status_code}: {shown(location or error.response.text)}"
            if (pause := error.response.headers.get("retry-after")) is not None:
                problem += f" (Retry-After: {shown(pause)}; a pause of more than two minutes is not waited for)"
            if error.status_code not in RETRIED_STATUS:
                raise ValueError(
                    f"{self.url}{path} rejects the request; it {problem}. Check distill.base_url, "
                    f"{KEY_VARIABLE}, and that the server's context window is the target's"
                ) from None
        except ValidationError as error:
            fault = error.errors()[0]
            raise ValueError(
                f"{self.url}{path} answers {shown(text)}, which isn't a reply of this protocol: "
                f"{'.'.join(map(str, fault['loc'])) or 'the reply'}: {fault['msg']}; is distill.base_url the address of a "
                "completions server?"
            ) from None
        # 2. The client has given up.
        times = "once; it" if num_tries == 1 else f"{num_tries} times; at last it"
        raise ConnectionError(f"{self.url}{path} failed {times} {problem}. {RESUME}")

    def close(self) -> None:
        """Cancel the remaining requests, and close their connections."""
        # Only requests are cancelled, and they cancel what they have begun: a task of the client that is cancelled before
        # its first step would leave a coroutine that was never awaited.
        for request in list(self._requests):
            request.cancel()
        self.submit(self._close()).result()

    async def _close(self) -> None:
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
        await self._client.close()


def require_client() -> None:
    """Raise ValueError if the package openai isn't installed."""
    if importlib.util.find_spec("openai") is None:
        raise ValueError(
            "distill.engine is a server, and the package openai isn't installed; pip install 'outrider[openai]', or set "
            "distill.engine=decoder"
        )


@contextmanager
def open_server(base_url: str) -> Iterator[CompletionsServer]:
    """Connect to the server at `base_url`; at the end, cancel the remaining requests.

    The key, if the server needs one, is read from the environment only.
    """
    require_client()
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

    class BoundedClient(DefaultAsyncHttpxClient):
        """HTTP client that reads at most MOST_REPLY_BYTES of a reply."""

        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            """Send a request, and read the reply part by part."""
            response = await super().send(request, stream=True, **options)
            return response if stream else await _read(response)

    timeout = Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    client = AsyncOpenAI(
        base_url=base_url,
        api_key=server_key() or NO_KEY,
        max_retries=MAX_RETRIES,
        timeout=timeout,
        # A redirected POST may become a GET, and the client would retry endless redirects.
        http_client=BoundedClient(timeout=timeout, follow_redirects=False),
    )
    # Use another thread, because the caller's thread may run an event loop already, as a notebook
    # does.
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="openai")
    thread.start()
    server = CompletionsServer(client, loop)
    try:
        yield server
    finally:
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _read(response: Any) -> Any:
    """Return a response with its whole body. Raises ValueError for an endless or huge one."""
    body = bytearray()
    try:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MOST_REPLY_BYTES:
                raise ValueError(
                    f"{response.url} answers with more than {MOST_REPLY_BYTES:,} bytes, which no reply of this protocol has; "
                    "is distill.base_url the address of a completions server?"
                )
    finally:
        await response.aclose()
    decoded = {"content-encoding", "content-length", "transfer-encoding"}
    headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in decoded]
    return type(response)(response.status_code, headers=headers, content=bytes(body), request=response.request)


def find_model(server: CompletionsServer, target_name: str) -> str:
    """Return the server's name of the target: the target's own name, or the only model's.

    Raises ValueError, with the served names, if there is none of these.
    """
    served = [model.id for model in server.submit(server.ask("models", _Models)).result().data]
    names = shown(", ".join(served)) or "nothing"
    if target_name in served:
        return target_name
    if len(served) != 1:
        raise ValueError(
            f"{server.url} serves {names}, and the target is {target_name!r}; serve the target under this name too (vLLM and "
            "SGLang: --served-model-name), or no other model"
        )
    return served[0]


@contextmanager
def open_servers(base_url: str, target_name: str) -> Iterator[list[tuple[CompletionsServer, str]]]:
    """Connect to the servers at addresses joined by commas; return each with its name of the target.

    Raises ValueError as `open_server` and `find_model` do.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(open_server(url)) for url in base_url.split(",")]
        yield [(server, find_model(server, target_name)) for server in servers]


@dataclass(frozen=True, kw_only=True)
class OpenAIEngine:
    """Engine that sends requests to servers in turns, at most `max_in_flight` at a time to each.

    Each request has its seed. Servers form batches from the requests that arrive, so rounding may
    differ from run to run, and with it a text.
    """

    servers: Sequence[tuple[CompletionsServer, str]]
    """Each with its name of the target."""
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    stop_ids: Sequence[int]
    sampling: Sampling
    limits: Limits
    max_in_flight: int = DEFAULT_IN_FLIGHT
    states_dir: Path | None = None
    """Folder into which the servers write hidden states, of which answers need none."""
    _logged: set[str] = field(default_factory=set)

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Yield an answer to every request, as they arrive.

        Closing the iterator early cancels the requests in flight. Raises ValueError if the server
        rejects a request or reads another prompt, and ConnectionError if it doesn't come back.
        """
        places = [(server, model, asyncio.Semaphore(self.max_in_flight)) for server, model in self.servers]
        futures = [
            server.submit(self._complete(server, model, request, slots))
            for request, (server, model, slots) in zip(requests, cycle(places), strict=False)
        ]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    async def _complete(self, server: CompletionsServer, model: str, request: Request, slots: asyncio.Semaphore) -> Answer:
        max_tokens = self.limits.room(len(request.prompt_ids))
        body = {
            **NO_FILTERS,
            "model": model,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": max_tokens,
            "temperature": self.sampling.temperature,
            "seed": request.seed,
            "stop_token_ids": list(self.stop_ids),
            "skip_special_tokens": False,  # of the text, for servers that return only text
            "return_token_ids": True,
        }
        body |= {name: value for name in ("top_k", "top_p") if (value := getattr(self.sampling, name)) is not None}
        async with slots:
            completion = await server.ask("completions", Completion, body)
            if self.states_dir is not None:
                await asyncio.to_thread(drop_states, server.url, completion.kv_transfer_params, self.states_dir)
        return self._checked(server.url, request, completion, max_tokens)

    def _checked(self, url: str, request: Request, completion: Completion, max_tokens: int) -> Answer:
        # 1. The server must have read exactly the prompt.
        num_prompt_tokens = completion.usage.prompt_tokens if completion.usage else None
        if num_prompt_tokens not in (None, len(request.prompt_ids)):
            raise ValueError(
                f"{url} read {num_prompt_tokens} tokens of a prompt of {len(request.prompt_ids)}: it adds tokens to prompts, "
                "or truncates them; turn that off in the server"
            )
        # 2. Its tokens, with a stop token unless the answer was cut.
        (choice,) = completion.choices
        tokens = self._tokens(url, choice, max_tokens)
        is_cut = choice.finish_reason == "length"
        end = next((index for index, token in enumerate(tokens) if token in self.stop_ids), None)
        if end is not None:
            if tokens[end + 1 :]:
                self._log_once("%s writes on after a stop token: its answers are cut there, where the target ends them", url)
            tokens, is_cut = tokens[: end + 1], False
        if not is_cut and not (tokens and tokens[-1] in self.stop_ids):
            tokens.append(self._stop_token(choice))
        if not all(0 <= token < self.vocab_size for token in tokens):
            raise ValueError(f"{url} answers with tokens that the target doesn't have; is it another model?")
        return Answer(id=request.id, tokens=torch.tensor(tokens, dtype=torch.long), cut=is_cut)

    def _tokens(self, url: str, choice: _Choice, max_tokens: int) -> list[int]:
        """Return the server's ids of the answer, or those of its text, which may be too many."""
        if choice.token_ids is not None:
            if len(choice.token_ids) > max_tokens:
                raise ValueError(
                    f"{url} answers with {len(choice.token_ids)} tokens, more than max_tokens={max_tokens}: it "
                    "ignores that limit; use a server that respects it, such as vLLM"
                )
            return choice.token_ids
        self._log_once(
            "%s answers with text, not with token ids: it is tokenized again, and may differ from the model's tokens "
            "(vLLM 0.10.2 and later send ids)",
            url,
        )
        # No token has more characters than the longest one. So the rest of a longer text would be cut anyway.
        text = (choice.text or "")[: (max_tokens + 1) * self._longest_token]
        tokens = list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        if len(tokens) > max_tokens:
            self._log_once(
                "%s answers with a text of more tokens than max_tokens=%d: such answers are cut there. Either "
                "the text has more tokens than the model wrote, or the server ignores that limit",
                url,
                max_tokens,
            )
        return tokens

    @cached_property
    def _longest_token(self) -> int:
        """Number of characters of the tokenizer's longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def _log_once(self, message: str, *args: object) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message, *args)

    def _stop_token(self, choice: _Choice) -> int:
        """Return the token that ended the answer: the server's, tokenizer's, or any stop token."""
        candidates = (choice.stop_reason, self.tokenizer.eos_token_id)
        return next((token for token in candidates if type(token) is int and token in self.stop_ids), self.stop_ids[0])


def _num_tries(error: Any) -> int:
    """Return how often the client has sent a request that failed, by the header that it adds."""
    return 1 + int(error.request.headers.get("x-stainless-retry-count", 0))
