"""Benchmarks of complete clusters under load."""
