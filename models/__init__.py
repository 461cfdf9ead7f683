"""The target, the drafters, and the decode loop that joins them."""

from ..data.entry import require_entry

require_entry()
