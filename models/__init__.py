"""The target, the drafters, and the decode loop that uses both."""

from ..data import require_entry

require_entry()
