"""Backends: the ways to run a model, from plain torch to our own decoder."""
