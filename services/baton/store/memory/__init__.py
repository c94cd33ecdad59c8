"""Stores in the memory of one process."""
