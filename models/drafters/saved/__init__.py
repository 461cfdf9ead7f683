"""Drafters in folders and on the Hub."""
