"""Short digests of JSON-like values."""

import hashlib
import json
from typing import Any


def digest_of(value: Any) -> str:
    """Compute a short digest of a JSON-like value; the order of keys doesn't matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
