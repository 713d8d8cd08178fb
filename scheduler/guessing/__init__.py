"""Guesses without a model: the text so far, other texts, earlier predictions."""
