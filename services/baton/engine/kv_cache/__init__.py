"""Bookkeeping of KV blocks: the pool, eviction, sizing, checksums."""
