"""Attacks on outrider, a module per kind: named cases, and what must come of each."""
