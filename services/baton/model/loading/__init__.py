"""Finds, checks and loads a model."""
