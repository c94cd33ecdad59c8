"""Shared state in Redis."""
