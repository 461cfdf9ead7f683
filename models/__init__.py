"""The target, the drafters, and the decode loop that joins them."""
