"""Whether a running server writes what the target would, and how fast."""
