"""Conversations, prompts, shards and batches: the bottom floor, which imports nothing else of outrider."""

from .entry import require_entry

require_entry()
