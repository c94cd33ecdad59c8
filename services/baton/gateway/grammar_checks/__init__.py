"""Compiles the grammars of requests before they are admitted."""
