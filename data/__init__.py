"""Conversations, prompts, shards and batches. Imports no other package of outrider."""

from .entry import require_entry

require_entry()
