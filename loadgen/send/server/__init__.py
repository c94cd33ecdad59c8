"""The server under test: what it serves, starting and stopping it, and waiting until it is idle."""
