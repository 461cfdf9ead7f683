"""Whether the Hugging Face Hub answers: a short check in place of the libraries' minutes of retries.

Where it doesn't, or breaks a bound of `hub_client`, the libraries read only their caches.
"""

import logging
import os
import sys
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_reasons = dict[str, str]()
"""Why a Hub isn't asked any more, by its address."""
TIMEOUT_SECONDS = 4.0
"""Longest wait for an answer. A second try follows, so a network that drops packets costs twice as
much."""


def use_hub() -> bool:
    """Return whether the Hub answers.

    If it doesn't, the libraries read only their caches from then on. Call this before any possible
    download. huggingface_hub alone would try each file six times, for half a minute, with two
    warnings per try. Raises ValueError if the cache is a file.
    """
    from huggingface_hub import constants

    require_cache_folder(constants.HF_HUB_CACHE)
    bound_requests()
    if constants.HF_HUB_OFFLINE:
        return False
    if _answers(constants.ENDPOINT):
        return True
    if not constants.HF_HUB_OFFLINE:
        go_offline(constants.ENDPOINT, f"the Hub ({constants.ENDPOINT}) can't be reached")
    return False


def require_cache_folder(cache: str) -> None:
    """Raise ValueError if the path of a cache, or of a folder above it, is a file."""
    existing = next(path for path in (Path(cache), *Path(cache).parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(
            f"{existing} is a file, and the cache {cache} must be a folder; set HF_HOME (or HF_HUB_CACHE or HF_ASSETS_CACHE, "
            "whichever is set) to a folder"
        )


@cache
def bound_requests() -> None:
    """Bound the time and size of the Hub's replies in this process: see `hub_client`."""
    from .hub_client import bound_requests

    bound_requests(go_offline)


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


def go_offline(endpoint: str, reason: str) -> None:
    """Let the libraries read only their caches from now on, because of a Hub's address."""
    from huggingface_hub import constants

    _reasons[endpoint] = reason
    constants.HF_HUB_OFFLINE = True
    # `datasets` copied the value when it was imported.
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.config.HF_HUB_OFFLINE = True


def why_offline() -> str:
    """Return why nothing is downloaded, after `use_hub` has returned False or a request was given up."""
    from huggingface_hub import constants

    if constants.ENDPOINT in _reasons:
        return _reasons[constants.ENDPOINT]
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"):
        return "nothing is downloaded, since HF_HUB_OFFLINE is set"
    return f"the Hub ({constants.ENDPOINT}) can't be reached"
