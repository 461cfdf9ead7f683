"""The files of a run: one JSON line an answer, and what they depend on."""
