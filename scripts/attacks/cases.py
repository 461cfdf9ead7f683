"""Cases of an attack, and the verdicts on them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ERROR, RIGHT, RECOMPUTED, WARNED, YOURS = "error", "right", "recomputed", "warned", "yours"
SILENT, WRONG, HANG, TRACEBACK, CRASH, UNCLEAR = "silent", "wrong", "hang", "traceback", "crash", "unclear"
ACCEPTED = "accepted"
HELD = {
    ERROR: "the command ends with one clear message",
    RIGHT: "the results are those without the attack",
    RECOMPUTED: "the results are right, and the damaged file is written anew",
    WARNED: "a warning names the damaged file",
    YOURS: "the file is documented as the user's to edit",
}
"""Verdicts of an attack that did no harm."""
BROKE = {
    SILENT: "the value is accepted without a word, and changes a result or stays in the folder",
    WRONG: "a token differs from plain decoding's",
    HANG: "the command runs for longer than the limit",
    TRACEBACK: "the user sees a traceback",
    CRASH: "a signal ends the process",
    UNCLEAR: "the command fails without a message, or with several",
}
"""Verdicts of an attack that did harm. ACCEPTED is SILENT with a reason."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict of an attack whose command ended well, and a note for the report."""

    verdict: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attack. `attack` runs in a process and an empty folder of its own."""

    kind: str
    name: str
    attack: Callable[[Path], Finding]
    """It raises what the attacked code raises."""


def outrider(*arguments: str) -> None:
    """Run a command of outrider in this process, as a user would.

    Raises SystemExit where it fails.
    """
    from outrider.cli.main import main

    sys.argv = ["outrider", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code not in (0, None):
            raise
