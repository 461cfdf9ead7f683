"""Short digests of JSON-like values."""

from typing import Any

from ...data.files import sha256_json


def digest_of(value: Any) -> str:
    """Compute a short digest of a JSON-like value; the order of keys doesn't matter."""
    return sha256_json(value)[:16]
