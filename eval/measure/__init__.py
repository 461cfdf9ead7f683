"""Measurement of plain decoding and drafters, and of the environment."""
