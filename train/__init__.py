"""Training: shards to a drafter's checkpoint."""

from ..data.entry import require_entry

require_entry()
