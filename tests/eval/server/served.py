"""A server of our own for the tests of `outrider check-server`: a target and a drafter behind HTTP, with faults."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from outrider.models.decoding import GreedyAcceptance, Sampling, SpeculativeSampling
from outrider.models.decoding.loop import generate
from outrider.models.decoding.sampling import RowSeeds
from outrider.models.drafters import NullDrafter
from outrider.models.llm.hf_target import HFTarget


class Handler(BaseHTTPRequestHandler):
    server: "Served"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        served = self.server
        if served.status_of_get != 200:
            self.send_response(served.status_of_get)
            self.send_header("Location", "http://elsewhere/")
            self.end_headers()
        elif self.path == "/metrics" and served.counts_drafts:
            self._send("\n".join(served.metrics()))
        elif self.path == "/props" and served.is_llama_cpp:
            self._send('{"default_generation_settings": {}}')
        elif self.path == "/v1/models" and not served.is_llama_cpp:
            self._send(json.dumps({"data": [{"id": name} for name in served.models]}))
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.headers.get("Authorization"))
        if self.server.stalls:
            self.server.ends.wait()
            return
        if self.server.trickle is not None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # the client has had enough
                while not self.server.ends.wait(self.server.trickle):
                    self.wfile.write(b"data: {" if self.server.trickle else b"x" * 100_000)
            return
        if self.server.error:
            self._send(self.server.error, 500)
            return
        with self.server.lock:  # one at a time: the target has one cache
            events = list(self.server.answer(body))
        if self.server.holds_characters and not body["stream"]:
            self._send(json.dumps(self.server.whole(events)))
            return
        if self.server.holds_characters:  # each character has two tokens, and its last one is streamed
            events = [*events[1:-1:2], events[-1]]
        self._send("".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events))

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


class Served(ThreadingHTTPServer):
    """The server. Its attributes are its faults."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, target: HFTarget, drafter: Any = None, *, is_llama_cpp: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.target, self.drafter, self.is_llama_cpp = target, drafter, is_llama_cpp
        self.lock, self.ends, self.keys = threading.Lock(), threading.Event(), set[str | None]()
        self.accepted: Counter[int] = Counter()
        self.num_drafted = 0
        self.num_drafted_each = 1
        self.counts_drafts = drafter is not None
        self.tells_drafts = False
        """With each answer, as llama.cpp does, and vLLM by an option."""
        self.wrong_one_in: int | None = None
        """Every so many tokens, one is replaced by an arbitrary one, from which the text goes on."""
        self.num_written = 0
        self.has_sampled = False
        self.ignores_temperature = self.ignores_limit = self.stalls = self.gives_text = False
        self.mixes_temperatures = False
        """After the first sampled answer all are sampled."""
        self.num_prompt_tokens: int | None = None
        self.trickle: float | None = None
        """Seconds between parts of a reply that never ends; 0 sends as much as it can."""
        self.reason: str | None = None
        """In place of the true reason for an answer's end."""
        self.writes_nothing = self.holds_characters = False
        self.error = ""
        self.status_of_get = 200
        self.models = ["served"]
        self.event: Any = None
        """In place of the events of an answer."""
        self.num_written_at_most: int | None = None
        self.num_tops: int | None = None
        self.spoilt_logprob: float | None = None
        self.metric: str | None = None
        """In place of each counter of drafts."""

    def metrics(self) -> Iterator[str]:
        """The text of /metrics, as vLLM and llama.cpp write it."""
        steps, accepted = self.accepted.total(), sum(length * count for length, count in self.accepted.items())
        for name, value in (("drafts", steps), ("draft_tokens", self.num_drafted), ("accepted_tokens", accepted)):
            yield f"# TYPE vllm:spec_decode_num_{name} counter"
            labels = "" if self.is_llama_cpp else '{engine="0",model_name="served"}'
            program = "llamacpp" if self.is_llama_cpp else "vllm"
            yield f"{program}:spec_decode_num_{name}_total{labels} {self.metric or float(value)}"
        for depth in range(4):
            count = sum(number for length, number in self.accepted.items() if length > depth)
            labels = f'{{engine="0",model_name="served",position="{depth}"}}'
            if not self.is_llama_cpp:
                yield f"vllm:spec_decode_num_accepted_tokens_per_pos_total{labels} {float(count)}"
                yield f"vllm:spec_decode_num_accepted_tokens_per_pos_created{labels} 1.7957e+09"
            elif steps:  # not before its first draft
                yield f'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="{depth}"}} {count}'

    def whole(self, events: list[Any]) -> dict[str, Any]:
        """Return the events of llama.cpp as one reply, which has all tokens."""
        names = ("tokens", "completion_probabilities")
        joined = {name: [item for event in events for item in event.get(name, [])] for name in names}
        return {**events[-1], **joined, "content": "".join(event["content"] for event in events)}

    def answer(self, body: dict[str, Any]) -> Iterator[Any]:
        """The events of an answer."""
        if self.event is not None:
            yield self.event
            return
        limit = body["n_predict" if self.is_llama_cpp else "max_tokens"] + 3 * self.ignores_limit
        limit = min(limit, self.num_written_at_most or limit)
        num_top = body.get("n_probs" if self.is_llama_cpp else "logprobs") or 0
        temperature = 0.0 if self.ignores_temperature else body["temperature"]
        self.has_sampled = self.has_sampled or temperature > 0
        if self.mixes_temperatures and self.has_sampled:
            temperature = 1.0
        tokens, prompt, num_prompt = list[int](), body["prompt"], self.num_prompt_tokens or len(body["prompt"])
        before = self.accepted.copy(), self.num_drafted
        while len(tokens) < limit and not (tokens and tokens[-1] in self.target.stop_ids):
            room = limit - len(tokens)
            if self.wrong_one_in:
                room = min(room, self.wrong_one_in - self.num_written % self.wrong_one_in)
            new = self._decode([*prompt, *tokens], room, temperature, body["seed"] + len(tokens))
            self.num_written += len(new)
            if self.wrong_one_in and self.num_written % self.wrong_one_in == 0:
                new[-1] = (new[-1] + 1234) % self.target.vocab_size
            tokens += new
        tops = self._tops(prompt, tokens, num_top)
        if body.get("ignore_eos"):  # its probabilities are those before the ban
            tokens[0] = next(token for token in tops[0] if token not in self.target.stop_ids)
        ended = tokens[-1] in self.target.stop_ids
        if self.writes_nothing:
            tokens, tops = [], []
        for token, top in zip(tokens, tops, strict=True):
            text = self.target.tokenizer.decode([token])
            if self.is_llama_cpp:
                places = [{"id": id, "logprob": value} for id, value in top.items()]
                written = [] if token in self.target.stop_ids else [token]
                yield {
                    "content": text,
                    "tokens": written,
                    "completion_probabilities": [{"top_logprobs": places}] if top and written else [],
                }
            else:
                choice = {"text": text, "token_ids": None if self.gives_text else [token]}
                logprobs = {"top_logprobs": [{f"token_id:{id}": value for id, value in top.items()}]} if top else None
                yield {"choices": [{**choice, "logprobs": logprobs, "finish_reason": None}]}
        if self.is_llama_cpp:
            last = {"content": "", "stop": True, "stop_type": "eos" if ended else "limit", "tokens_evaluated": num_prompt}
            yield {**last, "tokens_predicted": len(tokens), **self._told(*before)}
        else:
            yield {"choices": [{"text": "", "token_ids": [], "finish_reason": self.reason or ("stop" if ended else "length")}]}
            yield {"choices": [], "usage": {"prompt_tokens": num_prompt}, **self._told(*before)}
            yield "[DONE]"

    def _told(self, accepted: Counter[int], num_drafted: int) -> dict[str, Any]:
        """What an answer says of its drafts, given the counts before it."""
        if not self.tells_drafts:
            return {}
        new = self.accepted - accepted
        told = {"draft_n": self.num_drafted - num_drafted, "draft_n_accepted": sum(depth * new[depth] for depth in new)}
        if self.is_llama_cpp:
            return {"timings": told if told["draft_n"] else {}}
        found = {"num_spec_steps": new.total(), "acceptance_histogram": [new[depth] for depth in range(5)]}
        found |= {"num_draft_tokens": told["draft_n"], "num_accepted_draft_tokens": told["draft_n_accepted"]}
        return {"metrics": {"speculative_decoding": found}}

    @torch.inference_mode()
    def _decode(self, text: list[int], limit: int, temperature: float, seed: int) -> list[int]:
        rule = SpeculativeSampling(sampling=Sampling(temperature=temperature)) if temperature else GreedyAcceptance()
        options: dict[str, Any] = {"max_new_tokens": limit, "stop_ids": self.target.stop_ids, "generator": RowSeeds([seed])}
        drafter = self.drafter or NullDrafter()
        steps = list(generate(self.target, drafter, rule, [torch.tensor(text)], **options))
        self.accepted.update(step.num_accepted[0] for step in steps if not step.is_prefill)
        self.num_drafted += self.num_drafted_each * sum(step.num_nodes for step in steps)
        return [token for step in steps for token in step.tokens[0]]

    @torch.inference_mode()
    def _tops(self, prompt: list[int], tokens: list[int], num_top: int) -> list[dict[int, float]]:
        if not num_top:
            return [{} for _ in tokens]
        num_top = self.num_tops or num_top
        logits = self.target.plain_logits(torch.tensor([[*prompt, *tokens[:-1]]]), len(tokens))[0]
        values, ids = logits.log_softmax(-1).topk(num_top)
        if self.spoilt_logprob is not None:
            values = torch.full_like(values, self.spoilt_logprob)
        return [dict(zip(place, value, strict=True)) for place, value in zip(ids.tolist(), values.tolist(), strict=True)]


@contextmanager
def serving(server: Served) -> Iterator[Served]:
    """Run a server until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.ends.set()
        server.shutdown()
        thread.join()
        server.server_close()
