"""Research that nobody needs to run a model: training, and published methods kept for comparison."""
