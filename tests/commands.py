"""Commands of outrider in this process."""

import contextlib
import io
from typing import Any, NamedTuple

from outrider.cli.errors import user_errors
from outrider.cli.main import run_command


class Result(NamedTuple):
    """What a command did."""

    exit_code: int
    output: str
    """All that it printed, errors included."""


def invoke(arguments: "list[Any] | tuple[Any, ...]") -> Result:
    """Run a command, as `outrider ARGUMENTS` would."""
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            with user_errors():
                run_command([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Result(code, output.getvalue())
