"""Opens the device of a worker: executor, engine, KV memory and transfer backend."""
