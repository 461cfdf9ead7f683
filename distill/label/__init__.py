"""Labels texts with the target's own continuations: conversations to shards."""
