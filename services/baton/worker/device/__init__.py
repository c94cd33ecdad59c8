"""Opens the device of a worker: executor, engine limits, KV memory and transfer backend."""
