"""HTTP client of huggingface_hub with bounds: no server, slow or hostile, keeps a command waiting.

huggingface_hub's own timeouts (HF_HUB_DOWNLOAD_TIMEOUT, HF_HUB_ETAG_TIMEOUT) are those of one read
from a socket, and its API has none. So it waits without end for a reply whose bytes trickle. It also
sleeps as long as a server orders, and repeats a failed request five times.
"""

import contextvars
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

REPLY_SECONDS = 6.0
"""Longest wait for a whole reply of the API, for the head of a file, and for FILE_BYTES of a file."""
REPLY_BYTES = 64 << 20
"""Most bytes of a reply of the API."""
FILE_BYTES = 1024
RESUMED_BYTES = 1 << 20
"""Bytes after which huggingface_hub resumes a download that stalls or breaks off."""
WRITE_SECONDS = 60.0
"""Longest wait without a byte during an upload, and for the reply to it."""
MAX_FAILURES = 3
"""Failures of one request that the server asks to repeat: statuses 408, 429 and 5xx."""
UNASKED_PATH = "/api/agent-harnesses"
"""What huggingface_hub asks on its own, to name the program that uses it."""


def bound_requests(go_offline: Callable[[str, str], None]) -> None:
    """Let huggingface_hub use the client with bounds in this process.

    When the client gives the Hub up, it calls `go_offline` with the Hub's address and the reason.
    """
    options = {"event_hooks": get_session().event_hooks, "follow_redirects": True, "max_redirects": 5, "timeout": None}
    set_client_factory(partial(BoundedClient, go_offline, **options))


class BoundedClient(httpx.Client):
    """Client that gives a Hub up when a reply breaks one of this module's bounds.

    It then raises the error of the offline mode: the libraries read their caches, and don't retry.
    """

    def __init__(self, go_offline: Callable[[str, str], None], **options: Any) -> None:
        super().__init__(**options)
        self.go_offline, self.endpoint = go_offline, constants.ENDPOINT
        self.num_failures = Counter[tuple[str, str]]()
        """Failures since the last success, by method and path."""

    def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send a request within the bounds. Raises OfflineModeIsEnabled."""
        is_upload = request.method not in ("GET", "HEAD") and "/paths-info/" not in request.url.path
        bound = WRITE_SECONDS if is_upload else REPLY_SECONDS
        timeouts = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {name: min(timeouts.get(name) or bound, bound) for name in timeouts}
        if is_upload:
            return super().send(request, stream=stream, **options)
        request.headers["Accept-Encoding"] = "identity"  # or a small reply could become gigabytes
        if request.url.path == UNASKED_PATH:
            return httpx.Response(404, request=request)
        response = self._within_deadline(request, stream, options)
        if response.status_code in (408, 429) or response.status_code >= 500:
            self._count_failure(request, response)
        else:
            self.num_failures.pop((request.method, request.url.path), None)
        return response

    def _count_failure(self, request: httpx.Request, response: httpx.Response) -> None:
        """Give up after MAX_FAILURES, or where the server orders a wait of more than REPLY_SECONDS."""
        orders = f"t={response.headers.get('Retry-After', '')};{response.headers.get('RateLimit', '')}"
        seconds = max((int(number) for number in re.findall(r"\bt=(\d{1,18})", orders)), default=0)
        self.num_failures[key := (request.method, request.url.path)] += 1
        if seconds > REPLY_SECONDS or self.num_failures[key] >= MAX_FAILURES:
            response.close()
            order = f" and orders a wait of {seconds} s" if seconds > REPLY_SECONDS else f", {MAX_FAILURES} times"
            raise self.given_up(request, f"it answers with HTTP {response.status_code}{order}")

    def _within_deadline(self, request: httpx.Request, stream: bool, options: dict[str, Any]) -> httpx.Response:
        """Open the reply in a thread, which is left alone after REPLY_SECONDS.

        So the wait ends whether the resolution of a name, the handshake, the head or a body is slow.
        """
        outcome: list[httpx.Response | BaseException] = []

        def run() -> None:
            try:
                outcome.append(self._open(request, stream, options))
            except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
                outcome.append(error)

        context = contextvars.copy_context()  # huggingface_hub marks downloads in it
        thread = threading.Thread(target=context.run, args=(run,), daemon=True)
        thread.start()
        thread.join(REPLY_SECONDS)
        if not outcome or isinstance(outcome[0], httpx.ReadTimeout):
            raise self.given_up(request, f"no complete reply within {REPLY_SECONDS:g} s")
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def _open(self, request: httpx.Request, stream: bool, options: dict[str, Any]) -> httpx.Response:
        response = super().send(request, stream=True, **options)
        if response.headers.get("Content-Encoding", "identity") != "identity" and request.method != "HEAD":
            response.close()
            raise self.given_up(request, "it compresses a reply, though that wasn't asked for")
        response.stream = BoundedStream(response.stream, partial(self.given_up, request), None if stream else REPLY_BYTES)
        if not stream:
            with closing(response):
                response.read()
        return response

    def given_up(self, request: httpx.Request, problem: str) -> OfflineModeIsEnabled:
        """Use only the caches from now on, and return the error that names the request and the problem."""
        reason = f"the Hub ({self.endpoint}) was given up: {problem} ({request.method} {request.url.path})"
        self.go_offline(self.endpoint, reason)
        return OfflineModeIsEnabled(reason)


class BoundedStream(httpx.SyncByteStream):
    """Body of a reply. Reading it raises an error if it stalls, or is longer than `max_bytes`."""

    def __init__(self, stream: Any, given_up: Callable[[str], Exception], max_bytes: int | None) -> None:
        self.stream, self.given_up, self.max_bytes = stream, given_up, max_bytes

    def __iter__(self) -> Iterator[bytes]:
        """Yield the body's parts."""
        total, in_window, end = 0, 0, time.monotonic() + REPLY_SECONDS
        try:
            for part in self.stream:
                total, in_window = total + len(part), in_window + len(part)
                if self.max_bytes is not None and total > self.max_bytes:
                    raise self.given_up(f"a reply has more than {self.max_bytes} bytes")
                if time.monotonic() > end:
                    if in_window < FILE_BYTES:
                        raise httpx.ReadTimeout(f"{in_window} bytes in {REPLY_SECONDS:g} s")
                    in_window, end = 0, time.monotonic() + REPLY_SECONDS
                yield part
        except (httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.ReadError) as error:
            # huggingface_hub resumes a download from its last byte, without a limit while bytes arrive.
            if total >= RESUMED_BYTES:
                raise
            raise self.given_up(f"a reply stalls or breaks off after {total} bytes ({error})") from error

    def close(self) -> None:
        """Close the connection's stream."""
        self.stream.close()
