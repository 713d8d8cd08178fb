"""The parts of a layer: attention over a KV cache, MLPs, and modules of transformers."""
