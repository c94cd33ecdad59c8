"""The worker: an engine, its block pool, leases and transfers, joined into the service that gateways and
peers call. Imports neither torch nor any transport; Only `worker_main` gives it a device and a network."""
