"""Reads and validates client requests."""
