"""Conversations, prompts, shards and batches: the bottom floor, which imports nothing else of outrider."""
