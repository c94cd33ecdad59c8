"""Runs `baton` as `python -m baton.cli`, without depending on PATH."""

from baton.cli.main import main

main()
