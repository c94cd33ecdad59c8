"""Compares a backend with the model's own code at start."""
