"""Branches behind positions of a text, on which drafters with attention are trained."""
