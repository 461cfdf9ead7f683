"""Predicts how long answers are, and batches requests by it."""
