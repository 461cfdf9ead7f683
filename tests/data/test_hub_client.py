"""No server, slow or hostile, keeps a download waiting."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import httpx

from outrider.data import hub, hub_client
from outrider.data.raw_records import load_records
from outrider.models.drafters.saved.download import resolve_drafter
from outrider.models.export.hub import pull
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_tokenizer

SECONDS = 0.3
API, FILE = "/api/models/me/it", "/me/it/resolve/main/model.safetensors"
Attack = Callable[[BaseHTTPRequestHandler], None]


class Handler(BaseHTTPRequestHandler):
    """Handler that answers the look whether the Hub is there, and attacks other requests."""

    server: Any

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        self.server.attack(self) if self.path != "/" else reply(200)(self)

    def do_HEAD(self) -> None:
        self.do_GET()


def reply(status: int, body: bytes = b"", **headers: str) -> Attack:
    """Return an attack that replies so."""

    def attack(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return attack


def silent(handler: BaseHTTPRequestHandler) -> None:
    threading.Event().wait(3)


def drip(handler: BaseHTTPRequestHandler, part: bytes = b" ", num_parts: int = 100) -> None:
    reply(200, Content_Length="1000000000")(handler)
    for _ in range(num_parts):
        handler.wfile.write(part)
        time.sleep(SECONDS / 10)


def drip_head(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Long: ")
    for _ in range(100):
        handler.wfile.write(b"x")
        time.sleep(SECONDS / 10)


def endless(handler: BaseHTTPRequestHandler) -> None:
    drip(handler, bytes(1 << 16))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Start a server in the Hub's place, with short bounds and an empty cache."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.handle_error, server.requests = True, lambda *args: None, []
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_client, "REPLY_SECONDS", SECONDS)
    hub.bound_requests()
    yield server
    server.shutdown()
    server.server_close()


def client() -> hub_client.BoundedClient:
    return hub_client.BoundedClient(hub.go_offline, timeout=None, follow_redirects=True)


def get(server: Any, path: str, session: hub_client.BoundedClient | None = None) -> bytes:
    """Read a path as huggingface_hub does: a file in parts, and a reply of the API at once."""
    session = session or client()
    if "/api/" in path:
        return session.get(server.url + path).content
    with session.stream("GET", server.url + path) as response:
        return b"".join(response.iter_bytes())


@pytest.mark.parametrize("path", [API, FILE])
@pytest.mark.parametrize("attack", [silent, drip_head, drip])
def test_a_reply_that_trickles_or_never_comes_is_given_up(server: Any, attack: Attack, path: str) -> None:
    server.attack = attack
    started = time.monotonic()
    with pytest.raises(OfflineModeIsEnabled, match=rf"the Hub .* was given up: .*0.3 s.*\(GET {path}\)"):
        get(server, path)
    assert time.monotonic() - started < 5 * SECONDS
    assert constants.HF_HUB_OFFLINE, "the libraries read their caches alone from then on"
    assert "was given up" in hub.why_offline()


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (endless, "a reply has more than 100000 bytes"),
        (reply(200, gzip.compress(b"{}"), Content_Encoding="gzip"), "it compresses a reply"),
        (reply(200, b"{}", Content_Length="1000"), "a reply stalls or breaks off after 2 bytes"),
        (reply(429, Retry_After="7"), "HTTP 429 and orders a wait of 7 s"),
        (reply(429, RateLimit='"api";r=0;t=155'), "HTTP 429 and orders a wait of 155 s"),
        (reply(503), "HTTP 503, 3 times"),
    ],
)
def test_a_reply_beyond_a_bound_is_given_up(server: Any, monkeypatch: pytest.MonkeyPatch, attack: Attack, message: str) -> None:
    monkeypatch.setattr(hub_client, "REPLY_BYTES", 100_000)
    server.attack = attack
    session = client()
    for _ in range(2 if "3 times" in message else 0):  # huggingface_hub repeats the request
        get(server, API, session)
    with pytest.raises(OfflineModeIsEnabled, match=message):
        get(server, API, session)


def test_failures_with_successes_between_them_are_no_reason_to_give_up(server: Any) -> None:
    session = client()
    for _ in range(4):
        for attack in (reply(503), reply(200, b"{}")):
            server.attack = attack
            get(server, API, session)
    assert not constants.HF_HUB_OFFLINE


def test_an_answer_within_the_bounds_is_given_on(server: Any) -> None:
    server.attack = reply(200, b"{}", RateLimit='"api";r=480;t=155')  # what the Hub adds to each answer
    assert get(server, API) == b"{}"
    server.requests.clear()
    with client() as session:
        assert session.get(server.url + hub_client.UNASKED_PATH).status_code == 404
    assert (server.requests, constants.HF_HUB_OFFLINE) == ([], False)


def test_a_long_download_that_flows_is_read_whole(server: Any) -> None:
    num_parts = 30  # three windows

    def slow(handler: BaseHTTPRequestHandler) -> None:
        reply(200, Content_Length=str(num_parts << 10))(handler)
        for _ in range(num_parts):
            handler.wfile.write(bytes(1 << 10))
            time.sleep(SECONDS / 10)

    server.attack = slow
    assert len(get(server, FILE)) == num_parts << 10
    assert not constants.HF_HUB_OFFLINE


def test_a_download_that_stalls_later_is_resumed_by_the_library(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub handles a timeout of httpx, and asks for the rest."""
    monkeypatch.setattr(hub_client, "RESUMED_BYTES", 4)
    server.attack = drip
    with pytest.raises(httpx.ReadTimeout):
        get(server, FILE)
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("attack", [silent, drip, reply(429, Retry_After="3600"), reply(200, b"[1]"), reply(200, b"{")])
def test_each_command_ends_with_one_message(server, tmp_path, attack, monkeypatch):
    server.attack = attack
    commands: list[Callable[[], object]] = [
        lambda: pull("me/it", tmp_path / "pulled"),
        lambda: resolve_drafter("me/it"),
        lambda: load_tokenizer(TargetConfig(name_or_path="me/it")),
        lambda: list(load_records("me/it", file="a.json")),
    ]
    started = time.monotonic()
    for command in commands:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(ValueError, match="me/it"):
            command()
    assert time.monotonic() - started < 4
