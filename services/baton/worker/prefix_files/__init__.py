"""Exports of cached prefixes to files, and imports from them."""
