"""Device memory, KV tensors and copies between host and device."""
