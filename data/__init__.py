"""Conversations, prompts, shards and batches: the lowest package, which imports no other one of outrider."""

from .entry import require_entry

require_entry()
