"""Work in a thread, one piece behind the caller. Imports no torch."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)


class Behind:
    """Runs pieces of work in order in a thread, while the caller prepares the next piece.

    There is one piece at a time: `start` and `finish` wait for the last piece, and raise its error.
    As a context manager it waits for the last piece at the end, also after an error or Ctrl-C. So
    only a killed process loses a piece that was started.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown()  # waits for the last piece
        if kind is None:
            self.finish()
        elif self._last is not None and (failure := self._last.exception()) is not None:
            logger.error("%s", failure)  # the first error, which passes on, is the reason why the run ends

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in the thread, after the last piece has ended."""
        self.finish()
        self._last = self._pool.submit(work)

    def finish(self) -> None:
        """Wait for the last piece."""
        if self._last is not None:
            wait([self._last])  # Ctrl-C here leaves the piece, and its error, to `__exit__`
            last, self._last = self._last, None
            last.result()
