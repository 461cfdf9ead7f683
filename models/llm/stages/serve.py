"""What the process of a stage does: handle messages until the head ends."""

import logging
import signal
import threading
from typing import NoReturn

from ..linears import choose_linears
from .links import HeadLost, StageLink
from .stage import Stage

logger = logging.getLogger(__name__)

STOPPED, FAILED = 0, 1
"""Exit statuses of a stage: told to stop, or without a head or with an error."""


def serve(stage: Stage, link: StageLink, *, fast_linears: bool) -> NoReturn:
    """Handle messages, and end the process with the head.

    Linear layers are chosen when the first message arrives: stages of one machine then measure one
    after the other, undisturbed.
    """
    try:
        while (work := link.receive()) is not None:
            if fast_linears:
                choose_linears(*stage.layers.modules)
                fast_linears = False
            link.send(stage.handle(work, link.is_cancelled))
    except HeadLost as lost:
        logger.warning("the head has ended (%s), so this stage ends, too", lost)
        raise SystemExit(FAILED) from None
    except Exception as error:
        link.fail(f"{type(error).__name__}: {error}")
        raise
    raise SystemExit(STOPPED)


def leave_interrupts_to_the_head() -> None:
    """Ignore Ctrl-C, which reaches all processes of a terminal: the head stops the stages."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
