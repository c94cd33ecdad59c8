"""Benchmarks. Each one compares Baton with another system or with a hardware limit in the same run."""
