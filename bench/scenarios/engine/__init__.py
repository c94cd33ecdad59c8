"""Benchmarks of one worker: kernels, steps, starts."""
