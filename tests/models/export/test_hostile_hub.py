"""Replies that no Hub sends: one message each, without a traceback."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from outrider.data import hub
from outrider.data.raw_records import load_records
from outrider.models.drafters.saved.download import resolve_drafter
from outrider.models.export.hub import pull

ESCAPES = "\x1b[31mred\x1b]0;title\x07"
BODIES = {
    "nothing": b"",
    "half": b"{",
    "null": b"null",
    "list": b"[]",
    "number": b"5",
    "text": b'"a"',
    "no id": b"{}",
    "files of numbers": json.dumps({"id": "me/a", "sha": "a" * 40, "siblings": 5}).encode(),
    "files without names": json.dumps({"id": "me/a", "sha": "a" * 40, "siblings": [{}]}).encode(),
    "no commit": json.dumps({"id": "me/a", "siblings": []}).encode(),
    "deep": b"[" * 100_000,
    "escapes": json.dumps({"error": ESCAPES}).encode(),
    "binary": bytes(range(256)),
}
HEADERS = {
    "loop": (302, {"Location": "/a"}),
    "no address": (302, {"Location": "http://[::wrong"}),
    "file": (302, {"Location": "file:///etc/hostname"}),
    "no location": (302, {}),
    "no gzip": (200, {"Content-Encoding": "gzip"}),
    **{
        str(status): (status, {"X-Error-Message": ESCAPES[:8]}) for status in (400, 401, 403, 404, 405, 409, 418, 422, 451, 999)
    },
}


class Hostile(BaseHTTPRequestHandler):
    reply: tuple[int, dict[str, str], bytes] = (200, {}, b"")

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        status, headers, body = (200, {}, b"{}") if self.path in ("/", "/api/agent-harnesses") else self.reply
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[type[Hostile]]:
    """Serve one reply to every request for a repository."""
    handler = type("Handler", (Hostile,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hub._answers.cache_clear()
    for module in (huggingface_hub.hf_api, huggingface_hub.hf_api.api):
        monkeypatch.setattr(
            module, "ENDPOINT" if module is huggingface_hub.hf_api else "endpoint", constants.ENDPOINT, raising=False
        )
    yield handler
    server.shutdown()
    server.server_close()


def require_messages(tmp_path: Any) -> None:
    """Check that each way to the Hub ends in one message that names the repository."""
    start = time.monotonic()
    for read in (
        lambda: pull("me/a", tmp_path / "output"),
        lambda: resolve_drafter("me/a"),
        lambda: list(load_records("me/a", file="a.json")),
    ):
        with pytest.raises(ValueError, match="me/a"):
            read()
    assert time.monotonic() - start < 30
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_malformed_reply_is_one_message(endpoint, tmp_path, body):
    endpoint.reply = (200, {"Content-Type": "application/json"}, body)
    require_messages(tmp_path)


@pytest.mark.parametrize(("status", "headers"), HEADERS.values(), ids=HEADERS)
def test_a_wrong_status_or_redirect_is_one_message(endpoint, tmp_path, status, headers):
    endpoint.reply = (status, headers, b"wrong")
    require_messages(tmp_path)
