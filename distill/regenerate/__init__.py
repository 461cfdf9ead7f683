"""Replaces the answers of conversations by the target's own."""
