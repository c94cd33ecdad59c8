"""Shared state in the memory of one process."""
