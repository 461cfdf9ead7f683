"""Commands of outrider in this process."""

import contextlib
import io
from typing import Any, NamedTuple

from outrider.cli.errors import USER_ERROR, error_message
from outrider.cli.main import run_command


class Result(NamedTuple):
    """What a command did."""

    exit_code: int
    output: str
    """All that it printed, errors included."""

    @property
    def message(self) -> str:
        """The output on one line."""
        return " ".join(self.output.split())


def invoke(arguments: "list[Any] | tuple[Any, ...]") -> Result:
    """Run a command, as `outrider ARGUMENTS` would, but without silencing libraries and Ctrl-C."""
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            run_command([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except (ValueError, OSError) as error:
            code = USER_ERROR
            output.write(error_message(error))
    return Result(code, output.getvalue())


def call(*arguments: Any) -> str:
    """Return the output of a command that succeeds. Raises ValueError with the message of a user's mistake."""
    result = invoke(arguments)
    if result.exit_code == USER_ERROR:
        raise ValueError(result.message)
    assert result.exit_code == 0, result.output
    return result.output
