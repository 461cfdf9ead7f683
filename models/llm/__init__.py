"""The frozen target: loading and decoding any causal language model of transformers."""
