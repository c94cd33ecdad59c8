"""Compute kernels."""
