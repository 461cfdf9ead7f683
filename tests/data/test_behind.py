"""Work in a thread, one piece behind the caller."""

import logging
import threading
from collections.abc import Callable

import pytest

from outrider.data import behind as module
from outrider.data.behind import Behind


def test_one_piece_runs_at_a_time_and_in_order() -> None:
    done: list[int] = []
    may_end = threading.Event()

    def first() -> None:
        may_end.wait(10)
        done.append(1)

    with Behind("test") as behind:
        behind.start(first)
        assert not done, "the caller continues"
        may_end.set()
        behind.start(lambda: done.append(2))
        assert done[0] == 1, "the second piece waited for the first"
    assert done == [1, 2], "the last piece has ended"


def fail() -> None:
    raise ValueError("the disk is full")


def run_pieces(*pieces: Callable[[], None], interrupted: bool = False) -> None:
    with Behind("test") as behind:
        for piece in pieces:
            behind.start(piece)
        if interrupted:
            raise KeyboardInterrupt


def test_an_error_in_the_thread_reaches_the_caller_at_the_next_piece_or_at_the_end() -> None:
    started: list[int] = []
    with pytest.raises(ValueError, match="disk is full"):
        run_pieces(fail, lambda: started.append(1))
    with pytest.raises(ValueError, match="disk is full"):
        run_pieces(fail)
    assert not started


def test_an_error_of_the_caller_passes_on_and_the_last_piece_ends(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run_pieces(lambda: done.append(1), interrupted=True)
    assert done == [1]
    with caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt):
        run_pieces(fail, interrupted=True)
    assert "the disk is full" in caplog.text


def test_an_error_is_logged_if_the_caller_is_interrupted_while_it_waits(caplog, monkeypatch):
    def interrupted(futures: list[object]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "wait", interrupted)
    with caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt):
        run_pieces(fail, fail)
    assert "the disk is full" in caplog.text
