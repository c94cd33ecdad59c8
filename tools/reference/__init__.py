"""Generates the pages of `docs/reference/` from the code."""
