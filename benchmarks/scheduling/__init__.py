"""Benchmarks of schedulers and acceptance rules on recorded texts, and of their overhead."""
