"""A running server: its answers token by token, their times, and what it counts of its drafts.

Two protocols: that of OpenAI's completions (vLLM, SGLang), and llama.cpp's own. Prompts are token ids, so
the server's chat template has no part in the check.
"""

import codecs
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import httpx
from pydantic import BaseModel, FiniteFloat, NonNegativeInt, ValidationError
from transformers import PreTrainedTokenizerBase

from ...data.servers import KEY_VARIABLE, NO_ADDRESS, NO_FILTERS, is_address, server_address, server_key, shown
from .draft_counts import DraftCounts, counted, drafts_of_reply

CONNECT_SECONDS, SILENT_SECONDS, ANSWER_SECONDS = 10.0, 120.0, 900.0
"""Most seconds of a connection, between two parts of a reply, and of a whole reply."""
ENDED, CUT = ("stop", "eos", "word"), ("length", "limit")
"""Reasons for an answer's end in both protocols: the model ended it, or the limit did."""
ABSENT = (403, 404, 405, 501)
"""Statuses of a path that a server doesn't have, or a proxy before it doesn't offer."""
MOST_REPLY_BYTES = 16 << 20
"""Most bytes of a reply, which has some hundred bytes for each token."""

NO_FILTERS_LLAMA_CPP = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}
NO_FILTERS_LLAMA_CPP |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A server's answer to one prompt."""

    tokens: list[int]
    """Its tokens, without the stop token."""
    ended: bool
    """Whether a stop token ended it; else the limit did."""
    tops: list[dict[int, float]]
    """Log-probabilities of the most probable tokens at each place; empty unless they were asked for."""
    seconds: float
    first_seconds: float
    """Seconds until the first token."""
    is_retokenized: bool = False
    """Whether the server gave text only, which was tokenized here."""
    drafts: DraftCounts | None = None
    """Those of this answer, if the server counts them with it."""


class _Logprobs(BaseModel):
    top_logprobs: list[dict[str, FiniteFloat] | None] = []


class _Choice(BaseModel):
    token_ids: list[NonNegativeInt] | None = None
    text: str = ""
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = None


class _Chunk(BaseModel):
    """A part of a reply of OpenAI's protocol."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    metrics: Any = None
    error: Any = None


class _Top(BaseModel):
    id: NonNegativeInt
    logprob: FiniteFloat | None


class _Place(BaseModel):
    top_logprobs: list[_Top] = []


class _Part(BaseModel):
    """A part of a reply of llama.cpp's protocol."""

    tokens: list[NonNegativeInt] = []
    content: str = ""
    completion_probabilities: list[_Place] = []
    stop_type: str = ""
    tokens_evaluated: int | None = None
    tokens_predicted: int = 0
    timings: Any = None
    metrics: Any = None
    """vLLM's, in OpenAI's protocol."""
    error: Any = None

    def tops(self) -> list[dict[int, float]]:
        """Return the log-probabilities of the most probable tokens at each place."""
        places = self.completion_probabilities
        return [{top.id: top.logprob for top in place.top_logprobs if top.logprob is not None} for place in places]


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class Server:
    """A server that answers prompts of token ids.

    Every error of the server is a ValueError or a ConnectionError that names its address. A key, if it
    needs one, is read from the environment only, and never printed.
    """

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        stop_ids: Sequence[int],
        *,
        target_name: str = "",
        model: str | None = None,
    ) -> None:
        """`model` is the model's name there; None takes that of the target, or the only one."""
        if not is_address(url):
            raise ValueError(f"the server's URL {NO_ADDRESS}")
        self.url = server_address(url)
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, stop_ids
        key = server_key()
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),  # a server may close idle ones
            follow_redirects=False,
            trust_env=False,
        )
        self.is_llama_cpp = "default_generation_settings" in self._get("/props")
        self.model = "" if self.is_llama_cpp else self._model(model, target_name)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _get(self, path: str) -> str:
        """Return the text at a path; empty if the server doesn't have it."""
        return "".join(part for _, part in self._parts("GET", path, None))

    def _model(self, wanted: str | None, target_name: str) -> str:
        try:
            served = [model.id for model in _Models.model_validate_json(self._get("/v1/models")).data]
        except ValidationError:
            served = []
        if not served:
            raise ValueError(
                f"{self.url} is neither a server of OpenAI's completions nor one of llama.cpp: /v1/models lists no model, and "
                f"/props no settings. Is it the right address, and {KEY_VARIABLE} its key?"
            )
        if found := next((name for name in (wanted, None if wanted else target_name) if name in served), None):
            return found
        if wanted or len(served) > 1:
            named = (
                f"and none of them is model={wanted}"
                if wanted
                else f"and the target is {target_name!r}: name one by model, an option of check-server"
            )
            raise ValueError(f"{self.url} serves {shown(', '.join(served))}, {named}")
        return served[0]

    def counts(self) -> DraftCounts | None:
        """Return what the server has counted of its drafts; None if it doesn't say (llama.cpp: --metrics)."""
        return counted(self._get("/metrics"), self.url)

    def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        num_top: int = 0,
        may_end: bool = True,
    ) -> Reply:
        """Answer a prompt. `num_top` asks for the log-probabilities of so many tokens at each place.

        Without it the server is asked to read the whole prompt, also one that it has read before. Without `may_end`
        llama.cpp chooses no stop token; the log-probabilities have it.
        """
        body: dict[str, Any] = {"prompt": list(prompt), "temperature": temperature, "seed": seed, "stream": True}
        if self.is_llama_cpp:
            path, body = "/completion", {**NO_FILTERS_LLAMA_CPP, **body, "n_predict": max_tokens, "return_tokens": True}
            body |= {} if may_end else {"ignore_eos": True}
            body |= {"n_probs": num_top} if num_top else {"cache_prompt": False}
        else:
            path, body = "/v1/completions", {**NO_FILTERS, **body, "model": self.model, "max_tokens": max_tokens}
            body |= {"stop_token_ids": list(self._stop_ids), "skip_special_tokens": False, "return_token_ids": True}
            body |= {"stream_options": {"include_usage": True}}
            body |= {"logprobs": num_top, "return_tokens_as_token_ids": True} if num_top else {"cache_salt": token_hex(8)}
        started = time.perf_counter()
        reply, first = self._read(path, body)
        seconds = time.perf_counter() - started
        if reply.stop_type and reply.tokens_predicted > len(reply.tokens) + (reply.stop_type in ENDED):
            # llama.cpp streams the last token only of a character that has several, and none of an unfinished one.
            reply, _ = self._read(path, {**body, "stream": False})
        tokens, text, reason, num_read = reply.tokens, reply.content, reply.stop_type, reply.tokens_evaluated
        if reason and reason not in (*ENDED, *CUT):
            raise ValueError(f"{self.url}{path} ended an answer for the reason {shown(reason)!r}; see the server's log")
        if not reason:
            raise ConnectionError(f"{self.url}{path} ended its reply without a reason after {len(tokens)} tokens; is it busy?")
        if num_read not in (None, len(prompt)):
            raise ValueError(
                f"{self.url} read {num_read} tokens of a prompt of {len(prompt)}: it adds tokens to prompts, or truncates "
                "them; turn that off in the server"
            )
        is_retokenized = bool(text) and not tokens
        if is_retokenized:
            tokens = list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)[:max_tokens]
        ended = reason in ENDED
        end = next((index for index, token in enumerate(tokens) if token in self._stop_ids), None)
        if end is not None:
            tokens, ended = tokens[:end], True
        if not tokens and not ended:
            raise ValueError(f"{self.url}{path} was asked for {max_tokens} tokens and sent none, without an end of the answer")
        if not ended and not is_retokenized and len(tokens) < max_tokens:
            raise ValueError(
                f"{self.url}{path} was asked for {max_tokens} tokens and cut its answer after {len(tokens)}: its context "
                "window, or a limit of its own, is smaller"
            )
        if len(tokens) > max_tokens or any(token >= self._vocab_size for token in tokens):
            raise ValueError(
                f"{self.url}{path} was asked for {max_tokens} tokens and sent {len(tokens)}, the largest {max(tokens)} of a "
                f"vocabulary of {self._vocab_size}: it ignores limits, or serves another model"
            )
        first_seconds = seconds if first is None else first - started
        return Reply(
            tokens=tokens, ended=ended, tops=reply.tops(), seconds=seconds, first_seconds=first_seconds,
            is_retokenized=is_retokenized, drafts=drafts_of_reply(reply.metrics, reply.timings, reply.tokens_predicted),
        )  # fmt: skip

    def _read(self, path: str, body: dict[str, Any]) -> tuple[_Part, float | None]:
        """Return the parts of a reply as one, and the time of its first token."""
        whole, first = _Part(), None
        for at, event in self._events(path, body):
            part = self._valid(_Part, event) if self.is_llama_cpp else self._chunk(event)
            first = at if first is None and (part.tokens or part.content) else first
            whole.tokens += part.tokens
            whole.content += part.content
            whole.completion_probabilities += part.completion_probabilities
            whole.stop_type = part.stop_type or whole.stop_type
            whole.tokens_evaluated = part.tokens_evaluated or whole.tokens_evaluated
            whole.tokens_predicted = max(whole.tokens_predicted, part.tokens_predicted)
            whole.timings, whole.metrics = part.timings or whole.timings, part.metrics or whole.metrics
        return whole, first

    def _chunk(self, event: str) -> _Part:
        """Read a part of OpenAI's protocol as one of llama.cpp's."""
        chunk = self._valid(_Chunk, event)
        num_read = chunk.usage.prompt_tokens if chunk.usage else None
        if not chunk.choices:
            return _Part(tokens_evaluated=num_read, metrics=chunk.metrics)
        choice = chunk.choices[0]
        places = choice.logprobs.top_logprobs if choice.logprobs else []
        return _Part(
            tokens=choice.token_ids or [],
            content=choice.text,
            completion_probabilities=[_Place(top_logprobs=_tops(place)) for place in places],
            stop_type=choice.finish_reason or "",
            tokens_evaluated=num_read,
            metrics=chunk.metrics,
        )

    def _valid(self, kind: Any, event: str) -> Any:
        try:
            part = kind.model_validate_json(event)
            if part.error is not None:
                raise ValueError(f"{self.url} answers {shown(event)}")
            return part
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"])) or "the reply"
            raise ValueError(f"{self.url} answers {shown(event)}, where {place}: {fault['msg']}") from None

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, str]]:
        """Yield each event of a stream with its time; a reply that isn't a stream is one event."""
        rest = ""
        for at, part in self._parts("POST", path, body):
            rest += part
            if rest.lstrip().startswith("{"):
                continue
            *lines, rest = rest.split("\n")
            for line in lines:
                if line.startswith("data:") and (event := line[5:].strip()) != "[DONE]":
                    yield at, event
        if rest.lstrip().startswith("{"):
            yield time.perf_counter(), rest

    def _parts(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[tuple[float, str]]:
        """Yield the parts of a reply with their times. Raises an error that names the address and the fault."""
        deadline, num_bytes, url = time.perf_counter() + ANSWER_SECONDS, 0, f"{self.url}{path}"
        silence = ANSWER_SECONDS if body is not None and not body["stream"] else SILENT_SECONDS
        try:
            timeout = httpx.Timeout(silence, connect=CONNECT_SECONDS, pool=None)
            decode = codecs.getincrementaldecoder("utf-8")("replace").decode
            with self._client.stream(method, url, json=body, timeout=timeout) as response:
                is_bad = response.status_code != 200
                if body is None and response.status_code in ABSENT:
                    return
                message = response.headers.get("location", "")  # redirects aren't followed
                for part in map(decode, response.iter_bytes()):
                    num_bytes += len(part)
                    if num_bytes > MOST_REPLY_BYTES:
                        raise ValueError(f"{url} answers with more than {MOST_REPLY_BYTES:,} bytes, which no answer has")
                    if time.perf_counter() > deadline:
                        raise ConnectionError(f"{url} gave no complete reply within {ANSWER_SECONDS:.0f} s")
                    if is_bad:
                        message += part
                    else:
                        yield time.perf_counter(), part
                if is_bad:
                    raise ValueError(f"{url} answers {response.status_code}: {shown(message)}")
        except httpx.TimeoutException:
            raise ConnectionError(
                f"{url} sent nothing for {silence:.0f} s, or no connection for {CONNECT_SECONDS:.0f} s; is it busy?"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionError(f"{url} can't be read ({type(error).__name__}: {shown(str(error))})") from None


def _tops(place: dict[str, float] | None) -> list[_Top]:
    """Read the log-probabilities of a place, whose keys are `token_id:123`."""
    found = ((re.fullmatch(r"token_id:(\d+)", key), value) for key, value in (place or {}).items())
    return [_Top(id=int(match[1]), logprob=value) for match, value in found if match]
