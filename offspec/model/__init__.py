"""The decoder: what config.json says, a block's arithmetic, the KV cache, CUDA graphs of small passes."""
