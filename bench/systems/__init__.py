"""Systems under test: how each of them is started, and the stubs behind gateways."""
