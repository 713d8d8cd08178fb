"""Draft models grow trees, best first, with the guesses of other sources merged in."""
