"""Benchmarks of a single worker: kernels, engine steps and startup."""
