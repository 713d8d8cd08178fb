"""Trees of tokens, the noise that decides between tokens, and verification."""
