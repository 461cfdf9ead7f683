"""The frozen target labels texts with its own continuations: target -> shards."""
