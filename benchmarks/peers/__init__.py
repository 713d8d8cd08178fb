"""Comparison with other programs on the same work: `python -m benchmarks.peers --help`."""
