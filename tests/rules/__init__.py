"""Enumeration of acceptance rules on toy models."""
