"""Texts that run: requests, and the passes of the target that they share."""
