"""Evaluation: decode with and without drafters, record the turns, and report them.

The reports are tables and plots.
"""

from ..data import require_entry

require_entry()
