"""Decides when a request is rejected or has to wait at the scheduler."""
