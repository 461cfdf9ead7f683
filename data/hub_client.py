"""HTTP client of huggingface_hub with bounds: no server, slow or hostile, keeps a command waiting.

huggingface_hub alone waits without end for a reply whose bytes trickle, and for one of its API's
lists; it sleeps as long as a server orders, and retries each request for half a minute.
"""

import contextvars
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

from huggingface_hub import constants, set_client_factory
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import get_session, httpx  # its HTTP client, which isn't always the package httpx

from .offline import go_offline

REPLY_SECONDS = 6.0
"""Longest wait for a reply's head, with its redirects; for a reply of the API, also for its body."""
FILE_BYTES = 1024
"""Fewest bytes of a file that arrive in REPLY_SECONDS."""
RESUMED_BYTES = 1 << 20
"""Bytes after which a stalled download is resumed, as huggingface_hub does: up to five times."""
REPLY_BYTES = 64 << 20
"""Most bytes of a reply of the API."""
MAX_FAILURES = 3
"""Most failures of one request after which huggingface_hub tries again: statuses in a row, and short replies."""
WRITE_SECONDS = 60.0
"""Longest wait without a byte during an upload, and for the reply to it."""
UNASKED = "/api/agent-harnesses"
"""Path that huggingface_hub reads for its user agent alone. The client doesn't ask for it: a wrong reply ends commands."""
RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
LISTS = re.compile(r"/api/\w+/(?:[^/]+/)?[^/]+/(?:tree|paths-info)/")
"""Paths whose replies are lists of objects."""
OBJECTS = re.compile(r"/api/(?:models|datasets)/[^/]+/[^/]+(?:/revision/[^/]+)?/?$")
"""Paths whose replies are objects."""


class HubGivenUpError(OfflineModeIsEnabled):
    """Error of a request whose reply is too late, too long, or not a Hub's.

    The libraries handle it like the offline mode: they read their caches, and don't try again.
    """


def bound_requests() -> None:
    """Let huggingface_hub use the client with bounds in this process."""
    hooks = get_session().event_hooks
    set_client_factory(partial(BoundedClient, event_hooks=hooks, follow_redirects=True, max_redirects=5, timeout=None))


class BoundedClient(httpx.Client):
    """Client that gives a Hub up when a reply breaks one of this module's bounds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.failures = Counter[str]()

    def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send a request within the bounds. Raises HubGivenUpError."""
        timeouts = request.extensions.get("timeout", {})
        if request.url.path.endswith(UNASKED):
            return httpx.Response(httpx.codes.NOT_FOUND, request=request)
        # 1. Uploads may take long, but not stall.
        if request.method not in ("GET", "HEAD") and "/paths-info/" not in request.url.path:
            request.extensions["timeout"] = {name: timeouts.get(name) or WRITE_SECONDS for name in timeouts}
            try:
                return super().send(request, stream=stream, **options)
            except httpx.TimeoutException as error:
                raise _give_up(request, f"no byte within {WRITE_SECONDS:g} s") from error

        # 2. Read the head, and the body of a reply of the API, in a thread: it can be left alone at the deadline,
        # whether the name's resolution, the handshake or the reply is slow.
        request.extensions["timeout"] = {name: min(timeouts.get(name) or REPLY_SECONDS, REPLY_SECONDS) for name in timeouts}
        request.headers["Accept-Encoding"] = "identity"  # or a small reply could become gigabytes
        is_api = "/api/" in request.url.path
        response = _within_deadline(request, partial(self._open, request, is_api, stream, options))
        self._check_status(request, response)
        if is_api and response.status_code == httpx.codes.OK and not stream:
            _check_form(request, response)
        # 3. A file's body is read here.
        elif not stream:
            with closing(response):
                response.read()
        return response

    def _open(self, request: httpx.Request, is_api: bool, stream: bool, options: dict[str, Any]) -> httpx.Response:
        response = super().send(request, stream=True, **options)
        if response.headers.get("Content-Encoding", "identity") != "identity" and request.method != "HEAD":
            response.close()
            raise _give_up(request, "the reply isn't one of a Hub: it is compressed, though that wasn't asked for")
        max_bytes = REPLY_BYTES if is_api and not stream else None
        response.stream = BoundedStream(response.stream, request, max_bytes, self.failures)
        if is_api and not stream:
            with closing(response):
                response.read()
        return response

    def _check_status(self, request: httpx.Request, response: httpx.Response) -> None:
        """Give the Hub up after repeated failures, or if it orders a long wait."""
        name, status = f"{request.method} {request.url}", response.status_code
        if status not in RETRIED_STATUSES:
            self.failures.pop(name, None)
            return
        self.failures[name] += 1
        orders = f"t={response.headers.get('Retry-After', '')};{response.headers.get('RateLimit', '')}"
        seconds = max((int(number) for number in re.findall(r"\bt=(\d{1,18})", orders)), default=0)
        if seconds > REPLY_SECONDS or self.failures[name] == MAX_FAILURES:
            response.close()
            wait = f" and orders a wait of {seconds} s" if seconds else f" {MAX_FAILURES} times"
            raise _give_up(request, f"it answers with HTTP {status}{wait}")


class BoundedStream(httpx.SyncByteStream):
    """Body of a reply. Reading it raises an error if it stalls, or is longer than `max_bytes`."""

    def __init__(self, stream: Any, request: httpx.Request, max_bytes: int | None, failures: Counter[str]) -> None:
        self.stream, self.request, self.max_bytes, self.failures = stream, request, max_bytes, failures

    def __iter__(self) -> Iterator[bytes]:
        """Yield the body's parts."""
        total, in_window, end = 0, 0, time.monotonic() + REPLY_SECONDS
        try:
            for part in self.stream:
                total, in_window = total + len(part), in_window + len(part)
                if self.max_bytes is not None and total > self.max_bytes:
                    raise _give_up(self.request, f"the reply isn't one of a Hub: it has more than {self.max_bytes} bytes")
                if time.monotonic() > end:
                    if in_window < FILE_BYTES:
                        raise httpx.ReadTimeout(f"{in_window} bytes in {REPLY_SECONDS:g} s")
                    in_window, end = 0, time.monotonic() + REPLY_SECONDS
                yield part
        except (httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.ReadError) as error:
            # huggingface_hub resumes a download that had begun well.
            if total >= RESUMED_BYTES or "Range" in self.request.headers:
                raise
            if isinstance(error, httpx.ReadTimeout):
                raise _give_up(self.request, f"fewer than {FILE_BYTES} bytes in {REPLY_SECONDS:g} s") from error
            name = f"body of {self.request.url}"
            self.failures[name] += 1
            if self.failures[name] == MAX_FAILURES:
                raise _give_up(self.request, f"it broke a reply off {MAX_FAILURES} times") from error
            raise

    def close(self) -> None:
        """Close the connection's stream."""
        self.stream.close()


def _within_deadline(request: httpx.Request, exchange: Callable[[], httpx.Response]) -> httpx.Response:
    """Run an exchange in a thread, which is left alone after REPLY_SECONDS."""
    outcome: list[httpx.Response | BaseException] = []

    def run() -> None:
        try:
            outcome.append(exchange())
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            outcome.append(error)

    context = contextvars.copy_context()  # huggingface_hub marks downloads in it
    thread = threading.Thread(target=context.run, args=(run,), daemon=True)
    thread.start()
    thread.join(REPLY_SECONDS)
    if not outcome or isinstance(outcome[0], httpx.ReadTimeout):
        raise _give_up(request, f"no complete reply within {REPLY_SECONDS:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _check_form(request: httpx.Request, response: httpx.Response) -> None:
    """Give the Hub up if a reply of its API isn't JSON, or of another form than the libraries read."""
    is_list = LISTS.search(request.url.path)
    if request.method == "HEAD" or not (is_list or OBJECTS.search(request.url.path)):
        return
    problem = ""
    try:
        value = response.json()
        if is_list and not (isinstance(value, list) and all(isinstance(entry, dict) for entry in value)):
            problem = "no list of objects"
        elif not is_list and not isinstance(value, dict):
            problem = "no object"
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise _give_up(request, f"the reply isn't one of a Hub ({problem:.200})")


def _give_up(request: httpx.Request, problem: str) -> HubGivenUpError:
    """Use only the caches from now on, and return the error that names the request and the problem."""
    reason = f"the Hub ({constants.ENDPOINT}) was given up: {problem} ({request.method} {request.url.path})"
    go_offline(reason)
    return HubGivenUpError(reason)
