"""`python -m loadgen` is `loadgen`, without depending on the PATH."""

from loadgen.cli import main

main()
