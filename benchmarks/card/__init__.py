"""Measures offspec on a CUDA card: `python -m benchmarks.card --help`."""
