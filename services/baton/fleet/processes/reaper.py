"""A small process beside `baton up`: when that is gone, for whatever reason, so is soon all that it started.

`python -m baton.fleet.processes.reaper RUN_ID DIRECTORY`, with a pipe as standard input whose other end only
`baton up` holds.
"""

import signal
import sys
from pathlib import Path

from baton.fleet.processes.run_dir import sweep


def main() -> None:
    """Wait for the end of standard input, then sweep. Exit code 1 if a process would not end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(1):
        pass
    run_id, directory = sys.argv[1:]
    sys.exit(1 if sweep(run_id, Path(directory)) else 0)


if __name__ == "__main__":
    main()
