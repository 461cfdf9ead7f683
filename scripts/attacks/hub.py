"""Attacks by the replies of a Hub, or of what answers in its place, on downloads of three kinds."""

import gzip
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .cases import SILENT, Case, Finding, outrider

KIND = "hub"
SHA = "0" * 40
DRIP_SECONDS = 0.2
ESCAPES = "\x1b[2J\x1b]0;title\x07"


class Handler(BaseHTTPRequestHandler):
    """Handler that gives the server's hostile reply to every request but the first look."""

    server: Any

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer the look whether the Hub is there, and attack all other requests."""
        if self.path == "/":
            self.reply(200, b"")
        else:
            self.server.attack(self)

    def do_HEAD(self) -> None:
        """Do the same."""
        self.do_GET()

    def do_POST(self) -> None:
        """Do the same."""
        self.do_GET()

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        """Send a complete response."""
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def status(code: int, text: str = "no", **headers: str) -> Callable[[Handler], None]:
    """Return an attack that always replies with this status."""
    return lambda handler: handler.reply(code, text.encode(), **headers)


def model_info(siblings: Any) -> Callable[[Handler], None]:
    """Return an attack that lists these files, each of which is an empty mapping."""
    entity = {"X_Repo_Commit": SHA, "ETag": '"1"'}
    listing = json.dumps({"id": "me/it", "sha": SHA, "siblings": siblings, "private": False, "tags": []})

    def attack(handler: Handler) -> None:
        handler.reply(200, listing.encode() if "/api/" in handler.path else b"{}", **entity)

    return attack


def short(handler: Handler) -> None:
    """Promise more bytes than are sent."""
    handler.reply(200, b"{}", Content_Length="100000", X_Repo_Commit=SHA, ETag='"1"')
    handler.close_connection = True


def drip(handler: Handler) -> None:
    """Send a byte at a time, for ever."""
    handler.send_response(200)
    handler.send_header("X-Repo-Commit", SHA)
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(DRIP_SECONDS)


def silence(handler: Handler) -> None:
    """Never answer."""
    threading.Event().wait()


def hang_up(handler: Handler) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True


def no_http(handler: Handler) -> None:
    """Answer in another protocol."""
    handler.wfile.write(b"220 mail.example ESMTP\r\n\r\n")
    handler.close_connection = True


REPLIES: dict[str, Callable[[Handler], None]] = {
    "malformed JSON": status(200, "{no JSON", X_Repo_Commit=SHA, ETag='"1"'),
    "JSON of another type": status(200, "[1, null]", X_Repo_Commit=SHA, ETag='"1"'),
    "JSON nested without end": status(200, "[" * 200_000 + "]" * 200_000, X_Repo_Commit=SHA, ETag='"1"'),
    "a page of HTML": status(200, "<html>Log in</html>", Content_Type="text/html"),
    "redirects in a circle": lambda handler: handler.reply(302, b"", Location=handler.path),
    "a redirect to nowhere": status(302, "", Location="http://127.0.0.1:9/"),
    "status 401 with escapes": status(401, json.dumps({"error": ESCAPES}), X_Error_Message=repr(ESCAPES)),
    "status 429 for an hour": status(429, "slow down", Retry_After="3600"),
    "status 500": status(500, "oops"),
    "a short body": short,
    "files outside the folder": model_info([{"rfilename": "../../stolen"}, {"rfilename": "/tmp/stolen"}]),
    "files of another type": model_info(7),
    "a closed connection": hang_up,
    "another protocol": no_http,
    "bytes for ever": drip,
    "no answer": silence,
    "a bomb of gzip": lambda handler: handler.reply(200, gzip.compress(bytes(10**8), 1), Content_Encoding="gzip"),
}
"""Hostile replies. The last three wait, or are large."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "drafter": ("pull", "me/it", "--output", "pulled"),
    "target": ("run", "demo", "stages=[distill]", "target.name_or_path=me/it", "num_threads=1", "output_dir=run"),
    "data": (
        *("run", "demo", "stages=[distill]", "num_threads=1", "output_dir=run"),
        "data={source: messages, path: me/it, split: train, overlap_words: null}",
    ),
}


def make_cases(folder: Path, lab: Path) -> list[Case]:
    """Return a case for each reply and each kind of download."""
    return [
        Case(kind=KIND, name=f"{what}: {name}", attack=partial(download, attack, command))
        for what, command in COMMANDS.items()
        for name, attack in REPLIES.items()
    ]


def download(attack: Callable[[Handler], None], command: tuple[str, ...], place: Path) -> Finding:
    """Run a command against a hostile Hub: no reply holds anything that can be used."""
    # 1. The server.
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.attack, server.daemon_threads, server.handle_error = attack, True, lambda *args: None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # 2. The libraries have read the environment already.
    import datasets
    from huggingface_hub import constants

    url = f"http://127.0.0.1:{server.server_address[1]}"
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = False
    constants.ENDPOINT = datasets.config.HF_ENDPOINT = url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE = str(place / "cache")
    constants.AGENT_HARNESSES_PATH = str(place / "agents.json")  # a list that is kept between commands
    constants.HF_HUB_DISABLE_XET = True
    datasets.config.HF_DATASETS_CACHE = place / "datasets"
    outrider(*command)
    return Finding(SILENT, "the command ends well")
