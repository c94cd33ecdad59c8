"""Systems under test: how each one is started, and the stub workers behind gateways."""
