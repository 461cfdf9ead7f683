"""The offline mode of the libraries that read the Hub, and the reason for it."""

import os
import sys

_reasons = dict[str, str]()
"""Why a Hub isn't asked any more, by its address."""


def go_offline(reason: str) -> None:
    """Let the libraries read only their caches from now on."""
    from huggingface_hub import constants

    _reasons[constants.ENDPOINT] = reason
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
