"""Sends a plan to a server and records what happens."""
