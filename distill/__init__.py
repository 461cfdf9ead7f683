"""Distillation: the frozen target labels texts with its continuations, and writes shards."""
