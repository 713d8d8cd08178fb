"""Benchmarks of drafts: exit layers, drafts that learn from their target, targets specialised in a domain."""
