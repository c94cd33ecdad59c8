"""Runs checks in a child process that may crash or hang, and keeps their verdicts."""
