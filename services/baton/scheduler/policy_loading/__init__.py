"""Loads a scheduling policy by name: one of Baton's, or a function of any importable module."""
