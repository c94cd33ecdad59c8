"""`python -m baton.cli` is `baton`, without depending on the PATH."""

from baton.cli.main import main

main()
