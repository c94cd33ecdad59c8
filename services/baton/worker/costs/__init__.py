"""Step costs of a worker: measured at start, corrected by later steps, and stored for later workers."""
