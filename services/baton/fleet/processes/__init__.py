"""Child processes: start, restart, cleanup."""
