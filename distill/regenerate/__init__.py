"""Regeneration: replaces the answers of conversations by the target's answers."""
