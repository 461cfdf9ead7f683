"""Drafters in the formats of other programs, and on the Hub."""
