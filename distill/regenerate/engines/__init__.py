"""Engines that run the target while it regenerates answers, one per module."""
