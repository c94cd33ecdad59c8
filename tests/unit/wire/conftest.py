"""Loaded before the tests, and so before grpc, whose settings it brings."""

import baton.wire  # noqa: F401
