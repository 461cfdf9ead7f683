"""Distillation: the frozen target labels texts with its continuations, and writes shards."""

from ..data import require_entry

require_entry()
