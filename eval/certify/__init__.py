"""Proves that decoding is lossless: rules exactly, targets with drafters on real prompts."""
