"""Plans memory: what must be in memory, where it goes, and how long a pass then takes."""
