"""Cleans up after a `baton up` that ended in any way, including SIGKILL.

Run as `python -m baton.fleet.processes.reaper RUN_ID DIRECTORY`. Its standard input is a pipe whose other end
only `baton up` holds, so it ends when `baton up` does.
"""

import signal
import sys
from pathlib import Path

from baton.fleet.processes.run_dir import sweep


def main() -> None:
    """Wait until standard input ends, then sweep. Exit with 1 if a process could not be ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(1):
        pass
    run_id, directory = sys.argv[1:]
    sys.exit(1 if sweep(run_id, Path(directory)) else 0)


if __name__ == "__main__":
    main()
