"""Training: shards to a drafter's checkpoint."""
