"""The log of a run."""

import io
import logging

from tqdm import tqdm

from outrider.cli.run import LogHandler


def test_a_log_line_begins_on_a_new_line_while_a_bar_is_open() -> None:
    stream = io.StringIO()
    handler = LogHandler(stream)
    with tqdm(total=2, file=stream, desc="train", mininterval=0) as progress:
        progress.update()
        handler.emit(logging.LogRecord("outrider", logging.WARNING, "f", 1, "a warning", (), None))
    before, _ = stream.getvalue().split("a warning\n")
    assert before.rpartition("\r")[2] == ""
    assert before.rpartition("\r")[0].rpartition("\r")[2].strip() == "", "the bar was cleared"
