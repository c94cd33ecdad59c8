"""Command line of Baton: one module per group of commands. The packages that own a feature implement it."""

from baton.cli.main import main

__all__ = ["main"]
