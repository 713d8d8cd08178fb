"""Side by side with the peers, on the same work: `python -m benchmarks.peers --help`."""
