"""Drafters saved in folders and on the Hub."""
