"""Proof on real prompts that decoding with a target and drafters is lossless."""
