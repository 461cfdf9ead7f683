"""Whether the Hugging Face Hub answers: one short question, in place of the libraries' minutes of retries."""

import logging
import os
import sys
from functools import cache

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 4.0
"""Longest wait for an answer. A second try follows, so a network that drops packets costs twice as much."""


def use_hub() -> bool:
    """Return whether the Hub answers. Where it doesn't, the libraries read only their caches from then on.

    Call it before anything that may be downloaded. huggingface_hub alone would try each file six times, for half a
    minute, with two warnings a try.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if _answers(constants.ENDPOINT):
        return True
    constants.HF_HUB_OFFLINE = True
    if (datasets := sys.modules.get("datasets")) is not None:  # it copied the value when it was imported
        datasets.config.HF_HUB_OFFLINE = True
    return False


def why_offline() -> str:
    """Return why nothing is downloaded, after `use_hub` has returned False."""
    from huggingface_hub import constants

    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"):
        return "nothing is downloaded, since HF_HUB_OFFLINE is set"
    return f"the Hub ({constants.ENDPOINT}) can't be reached"


@cache
def _answers(endpoint: str) -> bool:
    """Whether anything answers there, whatever it answers. One retry, logged by the first process of a launch."""
    from huggingface_hub.utils import get_session, httpx  # its client, which isn't always the package of this name

    for is_last in (False, True):
        try:
            get_session().head(endpoint, timeout=TIMEOUT_SECONDS)
        except (httpx.HTTPError, OSError) as error:
            if not is_last and os.environ.get("RANK", "0") == "0":
                logger.warning("the Hub (%s) can't be reached (%s); trying once more", endpoint, error)
        else:
            return True
    return False
