"""The target, the drafters, and the decode loop that uses both."""
