"""Training on the target's output: a draft between requests (low-rank adapters), and exit layers."""
