"""Heads: small trained drafts that continue from their target's states."""
