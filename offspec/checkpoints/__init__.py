"""Models' files, opened and understood, before a weight is in memory."""
