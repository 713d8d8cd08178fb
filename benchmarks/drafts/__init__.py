"""What drafts bring: exit layers, drafts that learn from their target, targets that know a domain."""
