"""What a CUDA card makes of offspec: `python -m benchmarks.card --help`."""
