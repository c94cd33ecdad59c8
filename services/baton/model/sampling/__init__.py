"""Samples tokens from logits, on the host or on the device."""
