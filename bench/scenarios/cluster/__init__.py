"""Benchmarks of whole clusters under load."""
