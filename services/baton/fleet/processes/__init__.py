"""Starts, restarts and ends child processes, and cleans up after them."""
