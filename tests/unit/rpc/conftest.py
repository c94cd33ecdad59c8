"""Loaded before the tests, and so before grpc, whose settings it brings."""

import baton.rpc  # noqa: F401
