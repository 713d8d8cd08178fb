"""Bytes to tensors: checkpoints and where their weights live. Knows nothing of tokens, trees or architectures."""
