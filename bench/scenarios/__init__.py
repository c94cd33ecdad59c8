"""Benchmarks that can be run by name: `python -m bench NAME`."""
