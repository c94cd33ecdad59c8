"""Measures and tracks what this worker's steps cost."""
