"""Opens models' files and interprets them, before weights are loaded."""
