"""Sends a plan to a server and records every response."""
