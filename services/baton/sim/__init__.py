"""The whole cluster in one process under virtual time: the real services over simulated leaves (device,
bytes, calls, store)."""
