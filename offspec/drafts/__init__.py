"""What guesses the target's tokens."""
