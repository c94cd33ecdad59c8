"""Reads quantised checkpoints: one module for each published layout of tensors."""
