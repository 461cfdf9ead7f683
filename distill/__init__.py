"""The frozen target labels texts with its own continuations: target -> shards."""

from ..data.entry import require_entry

require_entry()
