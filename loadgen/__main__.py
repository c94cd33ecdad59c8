"""Runs the `loadgen` command as `python -m loadgen`."""

from loadgen.cli import main

main()
