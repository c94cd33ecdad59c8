"""Makes placement decisions, records them, and repeats them from their records."""
