"""Computation of table rows from records, and the tables and plots of them."""
