"""Who holds which block: an index in memory, kept right by the workers' numbered events."""
