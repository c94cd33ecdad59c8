"""Turns a step plan into tensors and runs the forward pass."""
