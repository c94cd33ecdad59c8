"""The engine: continuous batching over paged KV. Integers only; tensors are in `baton.model`."""
