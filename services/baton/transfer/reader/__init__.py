"""The side that pulls KV blocks from a peer."""
