"""Kernels for GPUs in Triton. Each module imports `triton`, so `backends.on_gpu` imports them only if it is there."""
