"""Reports of a worker: load and state to schedulers, KV events to the shared log."""
