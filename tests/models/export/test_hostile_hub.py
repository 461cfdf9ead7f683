"""Errors of huggingface_hub for replies that no Hub sends: one message, without a traceback."""

import json

import pytest
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import httpx

from outrider.models.drafters.saved.download import telling_hub_errors


@pytest.mark.parametrize("body", ["", "{", "null", "[]", "5", '"a"', "{}", "[" * 100_000])
def test_a_malformed_reply_is_one_message(body):
    with pytest.raises(ValueError, match=r"^me/a: the reply isn't one of a Hub \("), telling_hub_errors("me/a"):
        ModelInfo(**json.loads(body))


@pytest.mark.parametrize("error", [httpx.TooManyRedirects("20"), httpx.DecodingError("gzip"), httpx.InvalidURL("[::")])
def test_an_endless_redirect_or_wrong_encoding_is_one_message(error):
    with pytest.raises(ValueError, match="^me/a: the reply isn't one of a Hub"), telling_hub_errors("me/a"):
        raise error
