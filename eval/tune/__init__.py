"""Chooses a drafter's fastest setting on this machine."""
