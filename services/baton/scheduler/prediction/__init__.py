"""Predicts how long a worker needs for a request, in seconds."""
