"""What guesses the target's tokens: kinds of draft (`base.Draft`), each one object in a file of its own."""
