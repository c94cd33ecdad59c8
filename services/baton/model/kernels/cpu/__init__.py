"""Kernels in C++, compiled once on the machine that runs them. Without a compiler everything works through
torch, slower."""
