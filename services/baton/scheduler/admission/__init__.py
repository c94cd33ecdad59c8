"""Decides when a request is refused or has to wait."""
