"""KV blocks: content hashes, memory layout, and events about what a worker holds."""
