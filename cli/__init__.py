"""The terminal: thin commands over the public API of offspec. Knows nothing of how anything works."""
