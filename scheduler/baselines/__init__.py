"""Baselines: published methods for comparison with best-first drafting."""
