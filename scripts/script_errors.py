"""One message, instead of a traceback, where a script ends early."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def script_errors(kept: str | None = None) -> Iterator[None]:
    """End the script with one message on a user's mistake.

    `kept` names the results that Ctrl-C keeps, so that the same command continues.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        if kept is None:
            raise
        raise SystemExit(f"interrupted; finished {kept} are kept, and the same command continues") from None
