"""Cells, weight formats, targets and models of the benchmarks of one engine."""
