"""Shared cluster state: membership, decisions, step costs and KV block events, in Redis or in memory.

No token and no placement waits for a store.
"""
