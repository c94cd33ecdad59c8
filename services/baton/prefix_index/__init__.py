"""Index of which worker holds which KV block, updated by the numbered events of the workers."""
