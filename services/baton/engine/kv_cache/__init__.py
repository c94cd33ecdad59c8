"""KV blocks: pool, eviction, sizing and checksums."""
