"""Labelling of texts with the target's continuations, and the shards of labels."""
