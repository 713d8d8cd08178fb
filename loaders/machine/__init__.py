"""What this machine has and how fast it is."""
