"""Benchmarks of the control plane: gateway, scheduler, prefix index, capacity search."""
