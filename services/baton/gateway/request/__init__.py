"""Runs requests: placement, attempts, retries, and delivery of tokens. Start with `relay.py`."""
