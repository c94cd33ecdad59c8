"""Makes, records and explains placement decisions."""
