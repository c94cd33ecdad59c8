"""`python -m loadgen` is `loadgen`, without depending on the PATH."""

from loadgen.main import main

main()
