"""Conversations, prompts, shards and batches. Imports no other package of outrider."""
