"""What learns from the target: a draft between requests, an exit layer, low-rank additions."""
