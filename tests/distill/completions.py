"""A server of OpenAI's completions for tests: it decodes with a target, after the faults that it was given."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from outrider.distill.regenerate.engine import Limits, Request
from outrider.distill.regenerate.engines.decoder import DecoderEngine
from outrider.models.decoding import Sampling
from outrider.models.drafters import NullDrafter
from outrider.models.llm.hf_target import HFTarget

Reply = tuple[int, dict[str, str], bytes]
"""Status, headers and body of a response."""
Attack = Callable[["Handler"], None]
"""What a hostile server does with a request."""


class Server(ThreadingHTTPServer):
    """Server that answers completions with the tiny target.

    It first sends the replies in `faults`; None closes the connection. With an attack on completions
    or on the list of models, each of these requests gets that.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, target: HFTarget) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target
        self.lock = threading.Lock()
        self.faults: list[Reply | None] = []
        self.models = ["tiny"]
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.delay_seconds = 0.0
        # Number of requests that are answered before the server hangs; None for all.
        self.num_quick: int | None = None
        self.woken = threading.Event()
        self.num_inside = self.most_inside = 0
        self.change: Callable[[dict[str, Any]], None] = lambda reply: None
        self.attack: Attack | None = None
        self.attack_on_models: Attack | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *args: Any) -> None:
        # A client may close the connection: this is no error of the server.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*args)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = torch.tensor(body["prompt"])
        limits = Limits(max_new_tokens=body["max_tokens"], max_tokens=1000)
        top_k = body["top_k"] if body["top_k"] > 0 else None
        sampling = Sampling(temperature=body["temperature"], top_k=top_k, top_p=body["top_p"])
        engine = DecoderEngine(self.target, NullDrafter(), sampling=sampling, limits=limits)
        (answer,) = engine.answer([Request(id="", prompt_ids=prompt, seed=body["seed"])])
        generated = answer.tokens if answer.cut else answer.tokens[:-1]
        choice = {
            "index": 0,
            "text": self.target.tokenizer.decode(generated),
            "finish_reason": "length" if answer.cut else "stop",
            "stop_reason": None if answer.cut else int(answer.tokens[-1]),
            "token_ids": answer.tokens.tolist(),
        }
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(generated)}}


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        if self.server.attack_on_models is not None:
            self.server.attack_on_models(self)
            return
        self.reply(200, {}, json.dumps({"data": [{"id": name} for name in self.server.models]}).encode())

    def do_POST(self) -> None:
        assert self.path == "/v1/completions"
        content = self.rfile.read(length := int(self.headers["Content-Length"]))
        if len(content) < length:  # the client has closed the connection
            self.close_connection = True
            return
        body = json.loads(content)
        if self.server.attack is not None:
            self.server.bodies.append(body)
            self.server.attack(self)
            return
        with self.server.lock:
            self.server.keys.add(self.headers.get("Authorization"))
            self.server.num_inside += 1
            self.server.most_inside = max(self.server.most_inside, self.server.num_inside)
            fault = self.server.faults.pop(0) if self.server.faults else False
            hangs = self.server.num_quick == 0
            self.server.num_quick = max(self.server.num_quick - 1, 0) if self.server.num_quick is not None else None
        if hangs:
            self.server.woken.wait()
            self.close_connection = True
            return
        time.sleep(self.server.delay_seconds)
        with self.server.lock:
            self.server.num_inside -= 1
            if fault is None:
                self.close_connection = True
                return
            if fault:
                self.reply(*fault)
                return
            self.server.bodies.append(body)
            reply = self.server.complete(body)  # one at a time: the target has one cache
        self.server.change(reply)
        self.reply(200, {}, json.dumps(reply).encode())

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Serve until the end of the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.woken.set()
        server.shutdown()
        thread.join()
