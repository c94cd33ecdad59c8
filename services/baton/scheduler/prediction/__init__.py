"""Predicts what a request would cost on each worker, in seconds."""
