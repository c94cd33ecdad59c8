"""Shared state in Redis: who is there, what was decided. Never on the path of a token or a decision; twins
without Redis in `memory`."""
