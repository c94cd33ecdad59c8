"""Slower tiers of a worker's KV: host memory, copies out of the device, and reloads."""
