"""Guesses to tokens: trees, drafting, sampling, verification. Knows nothing of files, devices or architectures."""
