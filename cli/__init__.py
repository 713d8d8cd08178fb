"""The terminal: thin commands over the public API of offspec, without any logic of the engine."""
