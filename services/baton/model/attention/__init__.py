"""Paged attention: the reference implementation and its per-step index tensors."""
