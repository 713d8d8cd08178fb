"""The laboratory: research methods that nobody needs to run a model, and published ones kept for comparison."""
