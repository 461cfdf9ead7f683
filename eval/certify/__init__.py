"""Proof that decoding is lossless.

It is exact for rules, and on real prompts for targets with drafters.
"""
