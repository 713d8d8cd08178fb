"""What has to be in memory, where it goes, and what that will cost."""
