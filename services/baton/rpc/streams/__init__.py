"""Streams of messages over gRPC, with bounded buffers."""
