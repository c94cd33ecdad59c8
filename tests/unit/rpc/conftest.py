"""Imports baton.rpc before any test imports grpc, because baton.rpc sets grpc's environment variables."""

import baton.rpc  # noqa: F401
