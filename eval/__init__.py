"""Evaluation: decode with and without drafters, record each turn, and report tables and plots."""

from ..data.entry import require_entry

require_entry()
