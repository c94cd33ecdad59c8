"""Constrained sampling: which tokens a request's grammar, allowed tokens and bad words leave to be drawn."""
