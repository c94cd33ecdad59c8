"""Iteration-level batching over paged KV: integers here, tensors in `engine.model`."""
