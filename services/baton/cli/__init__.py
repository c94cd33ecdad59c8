"""`baton …`: one file a group of commands. What a command does lives in the package that owns it; here is
only the command line."""

from baton.cli.main import main

__all__ = ["main"]
