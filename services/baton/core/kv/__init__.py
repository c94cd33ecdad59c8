"""KV blocks: content hashes, memory layout, and events about the blocks that a worker holds."""
