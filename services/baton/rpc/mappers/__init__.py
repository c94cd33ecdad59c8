"""Mappings between core values and protobuf messages."""
