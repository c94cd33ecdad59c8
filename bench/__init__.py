"""Benchmarks: each compares Baton with a peer or a physical limit in the same run."""
