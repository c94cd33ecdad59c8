"""The side that owns KV blocks: leases and the service that peers read from."""
