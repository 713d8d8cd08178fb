"""What schedulers and rules of acceptance bring, on texts that are recorded once and replayed, and what they cost."""
