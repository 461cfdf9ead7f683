"""Proof that decoding is lossless: exact for rules, on real prompts for targets with drafters."""
