"""Training: shards to a drafter's checkpoint."""

from ..data import require_entry

require_entry()
