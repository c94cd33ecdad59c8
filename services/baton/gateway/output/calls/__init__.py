"""Reads tool calls in the layouts of the built-in formats."""
