"""Computes rows from records, and writes them as tables and plots."""
