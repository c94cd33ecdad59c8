"""The KV memory of a worker: allocated, registered with a transfer backend, and with its slower tiers."""
