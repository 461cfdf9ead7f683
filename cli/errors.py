"""Print a user's mistake as one message, without a traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

USER_ERROR = 2
"""Exit status after a user's mistake."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a ValueError or OSError as one message and exit with USER_ERROR; with OUTRIDER_DEBUG=1 let it through."""
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("OUTRIDER_DEBUG") == "1":
            raise
        sys.stderr.write(f"outrider: error: {error_message(error)}\n(OUTRIDER_DEBUG=1 shows where it was raised)\n")
        raise SystemExit(USER_ERROR) from None


def error_message(error: Exception) -> str:
    """The error's text; of a wrong configuration, our words for what is wrong."""
    from pydantic import ValidationError

    from ..data.fields import problems_of

    return "; ".join(problems_of(error)) if isinstance(error, ValidationError) else str(error)
