"""A short check whether the Hugging Face Hub answers.

It replaces minutes of retries in the libraries.
"""

import logging
import os
from functools import cache

from .offline import go_offline

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 4.0
"""Longest wait for an answer. A second try follows, so a network that drops packets costs twice as
much."""


def use_hub() -> bool:
    """Return whether the Hub answers.

    If it doesn't, the libraries read only their caches from then on. Call this before any possible
    download. huggingface_hub alone would try each file six times, for half a minute, with two
    warnings per try.
    """
    from huggingface_hub import constants

    bound_requests()
    if constants.HF_HUB_OFFLINE:
        return False
    if _answers(constants.ENDPOINT):
        return True
    if not constants.HF_HUB_OFFLINE:
        go_offline(f"the Hub ({constants.ENDPOINT}) can't be reached")
    return False


@cache
def bound_requests() -> None:
    """Bound the time and size of the Hub's replies in this process: see `hub_client`."""
    from .hub_client import bound_requests

    bound_requests()


@cache
def _answers(endpoint: str) -> bool:
    """Return whether a server answers at `endpoint`, with any status.

    There is one retry, which the first process of a launch logs.
    """
    # huggingface_hub's HTTP client, which isn't always the package httpx.
    from huggingface_hub.utils import get_session, httpx

    for is_last in (False, True):
        try:
            get_session().head(endpoint, timeout=TIMEOUT_SECONDS)
        except (httpx.HTTPError, OSError) as error:
            if not is_last and os.environ.get("RANK", "0") == "0":
                logger.warning("the Hub (%s) can't be reached (%s); trying once more", endpoint, error)
        else:
            return True
    return False
