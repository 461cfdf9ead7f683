"""Measures plain decoding and drafters, and describes where."""
