"""The frozen target: any causal language model of transformers, loaded and decoded with."""
