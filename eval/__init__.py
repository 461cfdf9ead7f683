"""Measures drafters: the same loop with and without them, recorded turn by turn, told as tables and plots."""

from ..data.entry import require_entry

require_entry()
